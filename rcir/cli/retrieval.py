"""`rcir retrieve` and `rcir serve`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcir.cli.arguments import add_fields, add_request_options, read_fields
from rcir.errors import InvalidConfig, naming_flags, printable
from rcir.risk.options import request_options
from rcir.serving.settings import TOKEN_VARIABLE, Settings

if TYPE_CHECKING:
    from rcir.retrieval.retriever import Retriever


def add_retrieve_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: queries, the retriever, the guarantee."""
    images = parser.add_argument(
        "image",
        nargs="*",
        action="extend",
        help="image file; for a retriever of vectors, also a file of vectors",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="TABLE",
        help="what a search engine returned, to be cut by a rule of certify --results: see there",
    )
    parser.add_argument(
        "--retriever", help="folder or MLflow URI; without it, RCIR_RETRIEVER names it"
    )
    add_request_options(parser, images)
    parser.add_argument(
        "--model", help="for images, the model that embedded a gallery of vectors: see certify"
    )
    parser.add_argument("--checkpoint", help=".safetensors file with the weights of the model")
    parser.add_argument(
        "--encounter",
        metavar="COLUMN",
        help="column of a file of vectors whose rows with the same value are one query (together)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: of several pictures, a list"
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        help="file for the pairs of query and item, a line each, as hloc and COLMAP read them",
    )


def run_retrieve(options: Namespace) -> None:
    """Print the answer of each picture."""
    from rcir.api import default_retriever, use

    if options.results is not None:
        return _cut_results(options)
    if not options.image:
        raise InvalidConfig("there is no query: name image files, or a file of vectors")
    retriever = use(options.retriever) if options.retriever else default_retriever()
    request = {option.name: getattr(options, option.name) for option in request_options()}
    names, queries = options.image, {"query": options.image}
    if options.model is not None:
        from rcir.runs.embedding import load_model

        encoder, preprocessing, _ = load_model(options.model, options.checkpoint)
        retriever.attach_encoder(encoder, preprocessing)
    if retriever.searcher.takes_vectors and not _are_embeddable(options.image, retriever):
        names, queries = _read_vectors(options, retriever)
    answers = retriever.retrieve(**request | queries)
    if not isinstance(answers, list):  # of one encounter
        names, answers = names[:1], [answers]
    if options.pairs is not None:
        from rcir.data.vector_files import write_pairs

        pairs = zip(names, answers, strict=True)
        write_pairs(options.pairs, [(name, item) for name, each in pairs for item in each.ids])
    if options.json:
        named = zip(names, answers, strict=True)
        plain = [{"query": name} | answer.to_dict() for name, answer in named]
        print(dumps(plain if len(plain) > 1 else plain[0], indent=1))
    elif len(answers) == 1:
        print(answers[0])
    else:
        for name, answer in zip(names, answers, strict=True):
            print(f"{printable(name)}:\n{answer.table()}\n")
        for guarantee in dict.fromkeys(str(answer.guarantee) for answer in answers):
            print(guarantee)


def _cut_results(options: Namespace) -> None:
    """Print the sets of the queries of a table of results."""
    from rcir.retrieval.result_tables import CertifiedResults, ResultTable

    if options.retriever is None:
        raise InvalidConfig("--results needs --retriever, the folder of the rule")
    unused = [name for name in ("image", "model", "encounter", "pairs") if getattr(options, name)]
    unused += [o.name for o in request_options()[2:] if getattr(options, o.name) != o.default]
    if unused or not isinstance(options.alpha, float):
        raise InvalidConfig(
            "the rule of --results limits sets without a match, by one alpha and a delta: leave "
            f"out {', '.join(unused) or 'other risks'}"
        )
    certified = CertifiedResults.load(Path(options.retriever))
    table = ResultTable.read(options.results, certified.rule.evidence.depth)
    sets, guarantee = certified.sets(table, options.alpha, options.delta)
    if options.json:
        print(dumps({"sets": sets, "guarantee": str(guarantee)}, indent=1))
        return
    for name, ids in sets.items():
        print(f"{printable(name)}: {' '.join(map(printable, ids))}")
    print(guarantee)


def _are_embeddable(files: list[str], retriever: Retriever) -> bool:
    """Return True if the files are images, and the retriever has an encoder for them."""
    from rcir.data.images import IMAGE_ENDINGS

    if Path(files[0]).suffix.lower() not in IMAGE_ENDINGS:
        return False
    if retriever.encoder is None:
        model = retriever.searcher.options.model
        remedy = "embed it with the model of the gallery, and pass the file of vectors"
        if model is not None:
            remedy = f"name the model of the gallery, with --model {model.rpartition('@')[0]}"
        raise InvalidConfig(f"{files[0]} is an image, and this retriever has no encoder: {remedy}")
    return True


def _read_vectors(options: Namespace, retriever: Retriever) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the queries in one file, and them as arguments of `retrieve`."""
    from rcir.data.vector_files import read_all_vectors

    files = options.image
    if len(files) > 1:
        raise InvalidConfig(
            f"expected one vector file with a row for each query, got {len(files)} files"
        )
    by_column = options.key is None and bool(retriever.searcher.gallery.parts)
    key = retriever.searcher.options.key if by_column else None
    table = read_all_vectors(Path(files[0]), key=key, encounter=options.encounter)
    names = table.ids or [f"row {row}" for row in range(len(table))]
    queries: dict[str, Any] = {
        "query": table.vectors,
        "uncertainty": table.uncertainty,
        "model": table.model,
    }
    if table.key is not None:
        queries["key"] = table.key.tolist()
    if table.encounter is not None:
        queries["together"] = table.encounter.tolist()
        names = list(dict.fromkeys(table.encounter.tolist()))
    return names, queries


def add_serve_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and settings of the server."""
    parser.add_argument("retriever", help="folder, or models:/NAME@ALIAS of MLflow's registry")
    add_fields(parser, Settings, without=("token", "most_bytes", "most_pixels"))
    parser.add_argument(
        "--replicas",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="minimum and maximum number of replicas on Ray Serve, on the cluster of RAY_ADDRESS "
        "if it is set",
    )
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of each replica on Ray Serve")


def run_serve(options: Namespace) -> None:
    """Serve until the process is stopped."""
    from rcir.serving import serve, serve_on_ray

    settings = read_fields(Settings, options, token=os.environ.get(TOKEN_VARIABLE) or None)
    with naming_flags(False):  # clients send fields, which are called like keywords
        if options.replicas is None:
            serve(options.retriever, settings)
        else:
            serve_on_ray(options.retriever, settings, tuple(options.replicas), options.gpus)
