"""The parts of a stored retriever: encoder, index, gallery, and the calibration with its queries.

Each part has a function that writes its files to a folder and one that reads them. Their checksums
were compared before; `rcir.retrieval.storage.load` turns any exception into a `CorruptRetriever`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.data.relevance import relevance_of
from rcir.data.repeats import BYTES
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import read_array
from rcir.index import Index, IndexConfig, KeepsDigests, find_index
from rcir.retrieval.calibration import Calibration, Coverage, Past
from rcir.retrieval.queries import Queries, VectorOptions
from rcir.retrieval.search import Searcher
from rcir.retrieval.tuning import CalibrationOptions, RuleKey, Rules
from rcir.risk import Population, ScoredResults, SetRule, score_function_class
from rcir.risk.losses import MISS
from rcir.trust import require_servers

if TYPE_CHECKING:  # vectors need no torch
    from torch import Tensor

    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders import Encoder, EncoderConfig

PAST = ("chosen_among", "attempts", "sequential")
EARLIER_FILE = "earlier.npy"  # digests of queries that calibrated before
NO_DIGESTS = np.empty(0, f"S{2 * BYTES}")
# Files of arrays with a row for each item
GALLERY_ARRAYS = {name: f"{name}.npy" for name in ("uncertainty", "digests", "norms", "clusters")}
QUERY_SPLITS = ("tuning", "calibration")
QUERY_NAMES = ("groups", "clusters")


# Encoder


def require_loadable(encoder: Encoder) -> None:
    """Raise `InvalidConfig` unless the configuration of an encoder names its class."""
    from rcir.encoders import find_method, method_name

    kind = type(encoder)
    name = method_name(kind)
    if kind.__module__ == "__main__":
        raise InvalidConfig(
            f"{kind.__name__} is defined in the program itself, which other programs cannot "
            "import: move it to a module, and set encoder.method to its import path"
        )
    if find_method(encoder.config.method) is not kind:
        raise InvalidConfig(
            f"the encoder is a {name}, but its configuration names {encoder.config.method}, which "
            f'would be loaded instead: build it with EncoderConfig("{name}", ...)'
        )


def save_encoder(encoder: Encoder, path: Path) -> None:
    """Write the weights of an encoder as safetensors."""
    save_tensors(encoder.state_dict(), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, with the permissions that the umask allows."""
    from safetensors.torch import save

    path.write_bytes(save({name: values.contiguous() for name, values in tensors.items()}))


def load_encoder(config: EncoderConfig, preprocessing: Preprocessing, path: Path) -> Encoder:
    """Build an encoder in evaluation mode with the weights in a file.

    Raises:
        InvalidData: some weights are NaN or infinite, or do not fit the configuration.
    """
    from safetensors.torch import load_file

    from rcir.encoders import build_encoder

    weights = load_file(path)
    for name, values in weights.items():
        if not values.isfinite().all():
            raise InvalidData(f"{path}: some of {name} are NaN or infinite")
    # Without pretrained weights nothing is downloaded: the file has all of them.
    encoder = build_encoder(config.without_weights(), preprocessing.channels, preprocessing.size)
    encoder.load_state_dict(weights)
    encoder.config = config
    return encoder.eval()


# Index and gallery


def save_index(index: Index, folder: Path) -> dict[str, Any]:
    """Write an index to the folder `index`; return its configuration."""
    target = folder / "index"
    target.mkdir()
    index.save(target)
    return asdict(IndexConfig.of(index))


def load_index(description: Mapping[str, Any], folder: Path) -> Index:
    """Read an index that `save_index` wrote and described."""
    config = IndexConfig(**description)
    options = config.index_options()
    require_servers(getattr(options, "hosts", ()))
    return find_index(config.kind).load(folder / "index", options)


def save_gallery(searcher: Searcher, folder: Path) -> None:
    """Write ids, relevance, embeddings and the other arrays of the gallery items."""
    (folder / "gallery.json").write_text(json.dumps(searcher.ids.tolist()))
    if searcher.relevance is not None:
        relevance = save_arrays(searcher.relevance.arrays())
        (folder / "relevance.safetensors").write_bytes(relevance)
    if searcher.items is not None:
        (folder / "items.safetensors").write_bytes(save_arrays(searcher.items.arrays()))
    for name, file in GALLERY_ARRAYS.items():
        values = getattr(searcher.gallery, name)
        if values is not None and not (name == "norms" and (values == 1).all()):
            np.save(folder / file, values, allow_pickle=False)


def load_gallery(folder: Path, files: Set[str]) -> dict[str, Any]:
    """Read a gallery as arguments of a `Searcher`.

    Args:
        folder: where `save_gallery` wrote it.
        files: names of the files in the folder.
    """
    arguments: dict[str, Any] = {"ids": json.loads((folder / "gallery.json").read_text())}
    if "relevance.safetensors" in files:
        arguments["labels"] = relevance_of(load_arrays(folder / "relevance.safetensors"))
    if "items.safetensors" in files:
        arguments["items"] = Embedding.from_arrays(load_arrays(folder / "items.safetensors"))
    for name, file in GALLERY_ARRAYS.items():
        if file in files:
            values = read_array(folder / file)
            arguments["item_uncertainty" if name == "uncertainty" else name] = values
    return arguments


def describe_digests(searcher: Searcher, checksums: Mapping[str, str]) -> dict[str, Any]:
    """Describe the digests of gallery and index by plain values.

    Args:
        searcher: of the retriever that is stored.
        checksums: of the files that it was written to, by name. They bind the digests to the files.
    """
    index, gallery = searcher.index, searcher.gallery
    if gallery.items is not None:
        gallery = replace(gallery)  # tensors may have been written to since they were digested
    return {
        "files": _joint_checksum(checksums),
        "gallery": gallery.digest,
        "index": index.digests() if isinstance(index, KeepsDigests) else [],
    }


def restore_digests(
    described: Mapping[str, Any], searcher: Searcher, checksums: Mapping[str, str]
) -> None:
    """Take the digests of gallery and index if they were computed of the files that were read.

    If a file is another one, nothing is taken: the digests are computed when they are needed.

    Args:
        described: what `describe_digests` returned.
        searcher: what was read from the files.
        checksums: of the files, by name.
    """
    if described["files"] != _joint_checksum(checksums):
        return
    searcher.gallery.restore_digest(described["gallery"])
    if isinstance(searcher.index, KeepsDigests):
        searcher.index.restore_digests(described["index"])


def _joint_checksum(checksums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


# Calibration queries


def save_queries(calibration: Calibration, folder: Path) -> None:
    """Write the queries of the tuning and the calibration split."""
    arrays: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for split in QUERY_SPLITS:
        queries: Queries = getattr(calibration, f"{split}_queries")
        arrays[f"{split}.vectors"] = queries.vectors
        if queries.uncertainty is not None:
            arrays[f"{split}.uncertainty"] = queries.uncertainty
        for part in ("relevance", "embedding"):
            values = getattr(queries, part)
            if values is not None:
                arrays |= {f"{split}.{part}.{key}": v for key, v in values.arrays().items()}
        texts[split] = {"cluster_word": queries.population.cluster_word}
        for name in QUERY_NAMES:
            values = getattr(queries.population, name)
            texts[split][name] = None if values is None else values.tolist()
    contiguous = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    (folder / "queries.safetensors").write_bytes(save_arrays(contiguous))
    (folder / "queries.json").write_text(json.dumps(texts))
    np.save(folder / "queries.npy", calibration.query_digests, allow_pickle=False)
    if len(calibration.past.digests):
        np.save(folder / EARLIER_FILE, calibration.past.digests, allow_pickle=False)


def load_queries(folder: Path, n_earlier: int) -> tuple[Queries, Queries, NDArray[np.bytes_]]:
    """Read what `save_queries` wrote.

    Args:
        folder: where it wrote.
        n_earlier: number of queries that calibrated before.

    Returns:
        The queries of the tuning and the calibration split, and digests of earlier ones.
    """
    arrays = load_arrays(folder / "queries.safetensors")
    texts = json.loads((folder / "queries.json").read_text())
    sizes = [len(arrays[f"{split}.vectors"]) for split in QUERY_SPLITS]
    digests = read_array(folder / "queries.npy")
    earlier = read_array(folder / EARLIER_FILE) if n_earlier else NO_DIGESTS
    splits = []
    for split, part in zip(QUERY_SPLITS, np.split(digests, [sizes[0]]), strict=True):
        splits.append(_queries(_below(f"{split}.", arrays), texts[split], part))
    tuning, calibration = splits
    return tuning, calibration, earlier


def _below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _queries(
    arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, Any], digests: NDArray[Any]
) -> Queries:
    relevance, embedding = _below("relevance.", arrays), _below("embedding.", arrays)
    names = {
        name: None if texts[name] is None else np.array(texts[name], str) for name in QUERY_NAMES
    }
    queries = Queries(
        arrays["vectors"],
        arrays.get("uncertainty"),
        embedding=Embedding.from_arrays(embedding) if embedding else None,
        population=Population(len(digests), digests),
    )
    return queries.with_population(
        relevance_of(relevance) if relevance else None, **names, cluster_word=texts["cluster_word"]
    )


# Calibrations


def describe_past(calibration: Calibration | None) -> dict[str, Any]:
    """Describe the past of a calibration by plain values; the digests are in a file."""
    past = Past(NO_DIGESTS) if calibration is None else calibration.past
    return {"queries": len(past.digests)} | {name: getattr(past, name) for name in PAST}


def describe_rules(
    calibration: Calibration,
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Describe the rules of a calibration by plain values, one dictionary each, and all arrays."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for kind in calibration.rules.kinds:
        rules = calibration.rules.of_kind(kind)
        main = rules[MISS.name]
        described.append(
            {
                "tuned_on": kind.tuned_on,
                "uncertainty": main.uncertainty,
                "distinct": kind.distinct,
                "score_functions": {risk: one.score_function.name for risk, one in rules.items()},
                "bound": main.bound,
            }
        )
        for risk, rule in rules.items():
            key = replace(kind, risk=risk)
            if kind.tuned_on == "gallery":
                labels = rule.tuning.population.labels
                assert labels is not None
                arrays[f"{_place(key, 'tuning')}labels"] = labels
            for part, values in (
                ("score_function", rule.score_function.state()),
                ("tuning", rule.tuning.arrays()),
                ("calibration", rule.calibration.arrays()),
            ):
                arrays |= {f"{_place(key, part)}{name}": array for name, array in values.items()}
    return described, arrays


def _place(key: RuleKey, part: str) -> str:
    """Return the beginning of the names of the arrays of a rule."""
    return f"{key.tuned_on}.{key.distinct}.{key.risk}.{part}."


def load_calibration(
    description: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], folder: Path
) -> Calibration:
    """Return the calibration that was described, and whose queries are in a folder."""
    described = description["controllers"]
    past, coverage = description["past"], description["coverage"]
    *queries, earlier = load_queries(folder, past["queries"])
    options = VectorOptions(**description["options"])
    populations = [options.as_evidence(part.population) for part in queries]
    rules = [_rules(one, arrays, *populations) for one in described]
    return Calibration(
        rules=Rules({key: rule for part in rules for key, rule in part.items()}),
        fingerprints=description["calibrated_on"],
        options=CalibrationOptions(**description["calibrated_with"]),
        tuning_queries=queries[0],
        calibration_queries=queries[1],
        chosen_among=description["chosen_among"],
        sequential=description["sequential"],
        coverage=None if coverage is None else Coverage(*coverage),
        past=Past(earlier, *(past[name] for name in PAST)),
        attempts=description["attempts"],
        left_out=description["left_out"],
    )


def _rules(
    described: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    tuned: Population,
    calibrated: Population,
) -> dict[RuleKey, SetRule]:
    """Return the rules of one kind."""
    rules = {}
    for risk, name in described["score_functions"].items():
        key = RuleKey(described["distinct"], risk, described["tuned_on"])
        tuning = _below(_place(key, "tuning"), arrays)
        if key.tuned_on == "gallery":
            tuned = Population(len(tuning["labels"]), labels=tuning["labels"])
        state = _below(_place(key, "score_function"), arrays)
        rules[key] = SetRule(
            score_function_class(name).from_state(state),
            ScoredResults.from_arrays(tuning, tuned),
            ScoredResults.from_arrays(_below(_place(key, "calibration"), arrays), calibrated),
            described["bound"],
            described["uncertainty"],
        )
    return rules
