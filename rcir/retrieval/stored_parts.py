"""The parts of a stored retriever: encoder, index, gallery, and the calibration with its queries.

Each part has a function that writes its files to a folder and one that reads and checks them.
Readers raise `ValueError`, `KeyError`, `RcirError` and other exceptions for invalid files;
`rcir.retrieval.storage.load` turns them into a `CorruptRetriever`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.data.relevance import Relevance, relevance_of
from rcir.data.repeats import BYTES
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import read_array
from rcir.index import Index, IndexConfig, KeepsDigests, find_index
from rcir.retrieval.calibration import Calibration, Coverage, Past, needs_embeddings
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import Searcher
from rcir.retrieval.tuning import CalibrationOptions, RuleSet
from rcir.risk import (
    ScoredResults,
    ScoreFunction,
    SearchResults,
    SetRule,
    score_function_class,
)
from rcir.risk.bounds import check_among
from rcir.risk.losses import MISS
from rcir.risk.request import Distinct
from rcir.risk.results import LABEL
from rcir.trust import require_servers

if TYPE_CHECKING:  # vectors need no torch
    from torch import Tensor

    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders import Encoder, EncoderConfig

Kinds = type | tuple[type, ...]
DESCRIPTION: dict[str, Kinds] = {
    "encoder": (dict, NoneType),
    "preprocessing": (dict, NoneType),
    "index": dict,
    "max_depth": int,
    "calibrated_on": dict,
    "origin": dict,
    "chosen_among": int,
    "attempts": int,
    "past": dict,
    "coverage": (list, NoneType),
    "left_out": (str, NoneType),
    "options": dict,
    "uncertainty": str,
    "calibrated_with": dict,
    "label_names": dict,
    "controllers": list,
    "digests": dict,
}
CONTROLLER: dict[str, Kinds] = {
    "distinct": (str, NoneType),
    "score_functions": dict,
    "bound": str,
    "groups": (list, NoneType),
    "cluster": (str, NoneType),
    "growing": bool,
    "tuned_on": str,
    "uncertainty": str,
}
PAST: dict[str, Kinds] = {"chosen_among": int, "attempts": int, "sequential": bool}
EARLIER_FILE = "earlier.npy"  # digests of queries that calibrated before
DIGESTS = np.dtype(f"S{2 * BYTES}")
GALLERY_ARRAYS: dict[str, tuple[str, Any]] = {  # arrays (n,): file and type
    "uncertainty": ("uncertainty.npy", np.float64),
    "digests": ("digests.npy", DIGESTS),
    "norms": ("norms.npy", np.float32),
    "clusters": ("clusters.npy", np.str_),
}
QUERY_SPLITS = ("tuning", "calibration")
QUERY_NAMES = ("groups", "clusters")


# Checks


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise `ValueError` with the message unless the condition is true."""
    if not condition:
        raise ValueError(message)


def require_fields(values: Any, kinds: Mapping[str, Kinds], what: str) -> None:
    """Raise `ValueError` unless a dictionary has exactly these fields with values of these types.

    A boolean is not accepted as an integer.
    """
    require(isinstance(values, dict) and values.keys() == kinds.keys(), f"fields of {what}")
    for name, kind in kinds.items():
        value = values[name]
        valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        require(valid, f"{what}: {name} is {str(value)[:40]!r}")


def require_texts(values: Any, what: str) -> None:
    """Raise `ValueError` unless a list, or the keys and values of a dictionary, are strings."""
    items = [*values.keys(), *values.values()] if isinstance(values, dict) else values
    valid = isinstance(items, list) and all(isinstance(item, str) for item in items)
    require(valid, f"{what}: some items are not strings")


def require_finite(values: Any, what: str) -> None:
    """Raise `ValueError` if nested lists and dictionaries contain NaN or infinity."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            require_finite(value, what)
    elif isinstance(values, float):
        require(bool(np.isfinite(values)), f"{what} contains {values}")


def require_array(
    values: NDArray[Any], dtype: Any, shape: tuple[int | None, ...], what: str
) -> None:
    """Raise `ValueError` unless an array has this type and shape and no NaN or infinity.

    None in the shape stands for any length.
    """
    valid = len(values.shape) == len(shape) and all(
        expected in (None, length) for expected, length in zip(shape, values.shape, strict=True)
    )
    same = values.dtype.kind == "U" if dtype is np.str_ else values.dtype == dtype
    require(valid and same, f"{what}: {values.dtype} of shape {values.shape}")
    if values.dtype.kind == "f":
        require(np.isfinite(values).all(), f"{what}: some numbers are NaN or infinite")


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
    plan = (config.without_weights(), preprocessing.channels, preprocessing.size)
    _require_shapes(plan, weights)
    encoder = build_encoder(*plan)
    encoder.load_state_dict(weights)
    encoder.config = config
    return encoder.eval()


def _require_shapes(
    plan: tuple[EncoderConfig, int, tuple[int, int]], weights: Mapping[str, Tensor]
) -> None:
    """Raise `InvalidData` for weights of another encoder, before memory is allocated for it.

    An edited configuration could request any amount of memory.
    """
    import torch

    from rcir.encoders import build_encoder

    try:
        with torch.device("meta"):
            expected = build_encoder(*plan).state_dict()
    except (RuntimeError, NotImplementedError):
        return  # the constructor of this encoder computes with its weights
    for name in expected.keys() | weights.keys():
        shapes = [tuple(each[name].shape) for each in (expected, weights) if name in each]
        if len(shapes) < 2 or shapes[0] != shapes[1]:
            raise InvalidData(f"weights {name} do not fit the configuration of the encoder")


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
    for name, (file, _) in GALLERY_ARRAYS.items():
        values = getattr(searcher.gallery, name)
        if values is not None and not (name == "norms" and (values == 1).all()):
            np.save(folder / file, values, allow_pickle=False)


def load_gallery(folder: Path, files: Set[str]) -> dict[str, Any]:
    """Read a gallery as arguments of a `Searcher`.

    Args:
        folder: where `save_gallery` wrote it.
        files: names of the files in the folder.
    """
    ids = json.loads((folder / "gallery.json").read_text())
    require_texts(ids, "gallery.json")
    arguments: dict[str, Any] = {"ids": ids}
    if "relevance.safetensors" in files:
        arrays = load_arrays(folder / "relevance.safetensors")
        arguments["labels"] = _relevance(arrays, len(ids))
    if "items.safetensors" in files:
        items = load_arrays(folder / "items.safetensors")
        for name, values in items.items():
            require_array(values, values.dtype, (len(ids), *(None,) * (values.ndim - 1)), name)
        arguments["items"] = Embedding.from_arrays(items)
    for name, (file, dtype) in GALLERY_ARRAYS.items():
        if file in files:
            values = read_array(folder / file)
            per_picture = name == "digests" and values.ndim == 2  # of templates
            require_array(values, dtype, (len(ids), None)[: 1 + per_picture], file)
            arguments["item_uncertainty" if name == "uncertainty" else name] = values
    norms = arguments.get("norms")
    require(norms is None or (norms >= 0).all(), "norms.npy: some are negative")
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
    require_fields(described, {"files": str, "gallery": str, "index": list}, "digests")
    require_texts(described["index"], "digests")
    if described["files"] != _joint_checksum(checksums):
        return
    searcher.gallery.restore_digest(described["gallery"])
    if isinstance(searcher.index, KeepsDigests):
        searcher.index.restore_digests(described["index"])


def _joint_checksum(checksums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


def _relevance(arrays: Mapping[str, NDArray[Any]], n: int) -> Relevance:
    """Build the relevance of n images from its arrays, checking what SciPy does not check."""
    if arrays.keys() == {"labels"}:
        require_array(arrays["labels"], np.int64, (n,), "labels")
    elif arrays.keys() == {"places", "radius"}:
        require_array(arrays["places"], np.float64, (n, None), "places")
        require_array(arrays["radius"], np.float64, (1,), "radius")
    else:
        matrix = arrays
        if all(name.startswith("table.") for name in arrays):
            matrix = {name.removeprefix("table."): values for name, values in arrays.items()}
        require(matrix.keys() == {"shape", "indptr", "indices"}, "arrays of relevance.safetensors")
        require_array(matrix["shape"], np.int64, (2,), "shape")
        indptr, indices = matrix["indptr"], matrix["indices"]
        for name, values in (("indptr", indptr), ("indices", indices)):
            require(values.ndim == 1 and values.dtype in (np.int32, np.int64), name)
        rows, labels = matrix["shape"].tolist()
        require(rows == n and 0 <= labels < 2**31, "shape")
        require(len(indptr) == n + 1 and indptr[0] == 0 and indptr[-1] == len(indices), "indptr")
        require((np.diff(indptr) >= 0).all(), "indptr decreases")
        require(((indices >= 0) & (indices < labels)).all(), "indices")
    return relevance_of(arrays)


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
        texts[split] = {"cluster": queries.cluster}
        for name in QUERY_NAMES:
            values = getattr(queries, name)
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
    require_fields(texts, dict.fromkeys(QUERY_SPLITS, dict), "queries.json")
    sizes = [len(arrays[f"{split}.vectors"]) for split in QUERY_SPLITS]
    digests = read_array(folder / "queries.npy")
    require_array(digests, DIGESTS, (sum(sizes),), "queries.npy")
    earlier = read_array(folder / EARLIER_FILE) if n_earlier else np.empty(0, DIGESTS)
    require_array(earlier, DIGESTS, (n_earlier,), EARLIER_FILE)
    splits = []
    for split, part in zip(QUERY_SPLITS, np.split(digests, [sizes[0]]), strict=True):
        prefix = f"{split}."
        names = [name for name in arrays if name.startswith(prefix)]
        values = {name.removeprefix(prefix): arrays.pop(name) for name in names}
        splits.append(_queries(values, texts[split], part))
    require(not arrays, f"there are further arrays: {', '.join(arrays)}")
    tuning, calibration = splits
    same = (tuning.uncertainty is None) == (calibration.uncertainty is None)
    require(same, "only one split has uncertainties")
    return tuning, calibration, earlier


def _queries(arrays: dict[str, Any], texts: dict[str, Any], digests: NDArray[Any]) -> Queries:
    n = len(digests)
    vectors = arrays.pop("vectors")
    require_array(vectors, np.float32, (n, None), "vectors of the queries")
    uncertainty = arrays.pop("uncertainty", None)
    if uncertainty is not None:
        require_array(uncertainty, np.float64, (n,), "uncertainty of the queries")
    parts: dict[str, dict[str, Any]] = {"relevance": {}, "embedding": {}}
    for name, values in arrays.items():
        part, _, key = name.partition(".")
        parts[part][key] = values
    relevance, embedding = parts["relevance"], parts["embedding"]
    same = np.array_equal(embedding.get("vectors", vectors[:0]), vectors)
    require(same or not embedding, "embeddings of the queries")
    for name, values in embedding.items():
        require(len(values) == n and np.isfinite(values).all(), f"{name} of the queries")
    require(texts.keys() == {"cluster", *QUERY_NAMES}, "fields of queries.json")
    names = {}
    for name in QUERY_NAMES:
        values = texts[name]
        valid = values is None or (len(values) == n and all(isinstance(v, str) for v in values))
        require(valid, f"{name} of the queries")
        names[name] = None if values is None else np.array(values, str)
    return Queries(
        vectors,
        uncertainty,
        digests=digests,
        embedding=Embedding.from_arrays(embedding) if embedding else None,
        relevance=_relevance(relevance, n) if relevance else None,
        cluster=texts["cluster"],
        **names,
    )


# Calibrations

Arrays = Mapping[str, NDArray[Any]]
TUNED_ON = ("queries", "gallery")


def describe_past(calibration: Calibration | None) -> dict[str, Any]:
    """Describe the past of a calibration by plain values; the digests are in a file."""
    past = Past(np.empty(0, DIGESTS)) if calibration is None else calibration.past
    return {"queries": len(past.digests)} | {name: getattr(past, name) for name in PAST}


def describe_rules(
    calibration: Calibration,
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Describe the rules of a calibration by plain values, one dictionary each, and all arrays."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    if calibration.on_gallery is not None:
        described, arrays = describe_rules(calibration.on_gallery)
    tuned_on = TUNED_ON[calibration.tuned_on_gallery]
    own: list[dict[str, Any]] = []
    for distinct, rules in calibration.rules.items():
        main = rules.main
        groups = main.calibration.groups
        by_risk = {"main": main, **rules.by_risk}
        own.append(
            {
                "tuned_on": tuned_on,
                "uncertainty": calibration.uncertainty,
                "distinct": distinct,
                "score_functions": {risk: one.score_function.name for risk, one in by_risk.items()},
                "bound": main.bound,
                "groups": None if groups is None else groups.tolist(),
                "cluster": main.calibration.cluster,
                "growing": calibration.sequential,
            }
        )
        for risk, rule in by_risk.items():
            if calibration.tuned_on_gallery:
                place = _place(tuned_on, distinct, risk, "tuning")
                arrays[f"{place}labels"] = rule.tuning.require("query_labels")
            for part, values in (
                ("score_function", rule.score_function.state()),
                ("tuning", rule.tuning.arrays()),
                ("calibration", rule.calibration.arrays()),
            ):
                place = _place(tuned_on, distinct, risk, part)
                arrays |= {f"{place}{name}": array for name, array in values.items()}
    return own + described, arrays


def _place(tuned_on: str, distinct: Distinct, risk: str, part: str) -> str:
    """Return the beginning of the names of the arrays of a rule."""
    return f"{'gallery.' * (tuned_on == 'gallery')}{distinct}.{risk}.{part}."


def load_calibration(
    description: Mapping[str, Any], arrays: Arrays, folder: Path, searcher: Searcher
) -> Calibration:
    """Return the calibration that was described, and whose queries are in a folder.

    Raises:
        ValueError, KeyError, RcirError, and other exceptions: a part is damaged.
    """
    described = description["controllers"]
    for one in described:
        require_fields(one, CONTROLLER, "a controller")
    past, coverage = description["past"], description["coverage"]
    require_fields(past, PAST | {"queries": int}, "past")
    valid = coverage is None or (
        len(coverage) == 2
        and all(type(n) is int for n in coverage)
        and 0 <= coverage[0] <= coverage[1]
    )
    require(valid and (coverage is None or coverage[1] > 0), "coverage")
    require(description["left_out"] in (None, searcher.options.left_out), "left_out")
    *queries, earlier = load_queries(folder, past["queries"])
    unread = dict(arrays)
    kinds = list(dict.fromkeys(one["tuned_on"] for one in described))
    require(kinds in (["queries"], ["gallery"], ["queries", "gallery"]), f"rules tuned on {kinds}")
    calibrations = []
    for kind in kinds:
        parts = [one for one in described if one["tuned_on"] == kind]
        alike = {(one["growing"], one["uncertainty"]) for one in parts}
        require(len(alike) == 1, "controllers that grow and others that do not")
        sequential, uncertainty = alike.pop()
        require(uncertainty in searcher.uncertainties, f"uncertainty {uncertainty}")
        tuned, calibrated = queries if kind == "queries" else (queries[0][:0], queries[1])
        calibrations.append(
            Calibration(
                rules=_rules_by_distinct(parts, unread, searcher.gallery, tuned, calibrated),
                fingerprints=dict(description["calibrated_on"], uncertainty=uncertainty),
                options=CalibrationOptions(**description["calibrated_with"]),
                uncertainty=uncertainty,
                tuning_queries=tuned,
                calibration_queries=calibrated,
                chosen_among=check_among(description["chosen_among"]),
                sequential=sequential,
                coverage=None if coverage is None else Coverage(*coverage),
                past=Past(earlier, *(past[name] for name in PAST)),
                attempts=check_among(description["attempts"]),
                left_out=description["left_out"],
            )
        )
        complete = calibrated.embedding is not None and (tuned.embedding is not None or not tuned)
        require(
            complete or not needs_embeddings(searcher, uncertainty), "embeddings of the queries"
        )
    require(not unread, f"there are further arrays: {', '.join(unread)}")
    first, *others = calibrations
    require(len(first.tuning_queries) == len(queries[0]), "queries that tuned nothing")
    require(first.uncertainty == description["uncertainty"], "uncertainty")
    return replace(first, on_gallery=others[0]) if others else first


def _rules_by_distinct(
    described: list[Any],
    unread: dict[str, NDArray[Any]],
    gallery: Gallery,
    tuned: Queries,
    calibrated: Queries,
) -> dict[Distinct, RuleSet]:
    """Return the rules that were tuned alike; their arrays are removed from `unread`."""
    kinds = [one["distinct"] for one in described]
    expected = [None] if gallery.labels is None else [None, "label"]
    require(kinds == expected, f"controllers of {kinds}, expected those of {expected}")
    rules = {one["distinct"]: _rules(one, unread, tuned, calibrated) for one in described}
    for distinct, of_kind in rules.items():
        for rule in (of_kind.main, *of_kind.by_risk.values()):
            _try(rule, gallery, distinct)
            require(len(rule.calibration) == len(calibrated), "controllers of other queries")
            require(len(rule.tuning) == len(tuned) or not tuned, "controllers of other queries")
    return rules


def _rules(
    described: dict[str, Any], unread: dict[str, NDArray[Any]], tuned: Queries, calibrated: Queries
) -> RuleSet:
    """Return one set of rules; its arrays are removed from `unread`."""
    score_functions, groups = described["score_functions"], described["groups"]
    require_texts(score_functions, "score_functions")
    if groups is not None:
        require_texts(groups, "groups")
        groups = np.array(groups, str)

    def part(risk: str, name: str) -> dict[str, NDArray[Any]]:
        prefix = _place(described["tuned_on"], described["distinct"], risk, name)
        names = [key for key in unread if key.startswith(prefix)]
        return {key.removeprefix(prefix): unread.pop(key) for key in names}

    def rule(risk: str) -> SetRule:
        tuning = part(risk, "tuning")
        own = (tuned.labels, tuned.label) if tuned else (tuning.pop("labels"), LABEL)
        return SetRule(
            _score_function(score_functions[risk], part(risk, "score_function")),
            _results(tuning, tuned.groups if tuned else None, described["cluster"], *own),
            _results(
                part(risk, "calibration"),
                groups,
                described["cluster"],
                calibrated.labels,
                calibrated.label,
                calibrated.keys,
            ),
            described["bound"],
        )

    return RuleSet({MISS.name if risk == "main" else risk: rule(risk) for risk in score_functions})


def _score_function(name: str, state: Arrays) -> ScoreFunction:
    for key, values in state.items():
        dtype = np.int64 if key == "uses" else np.float64
        require_array(values, dtype, (None,) * values.ndim, key)
    if "sample" in state:
        sample = state["sample"]
        require(len(sample) > 0 and (np.diff(sample) >= 0).all(), "sample is not ascending")
    if "uses" in state:
        require(np.isin(state["uses"], (0, 1)).all(), "uses: others than 0 and 1")
    function = score_function_class(name).from_state(state)
    again = function.state()
    same = again.keys() == state.keys() and all(
        np.array_equal(values, again[key]) for key, values in state.items()
    )
    require(same, f"arrays of {name}")
    return function


def _results(
    arrays: Arrays,
    groups: NDArray[np.str_] | None,
    cluster: str | None,
    labels: NDArray[np.int64] | None,
    label: str,
    keys: NDArray[np.int64] | None = None,
) -> ScoredResults:
    n, depth = arrays["relevant"].shape
    require(set(np.unique(arrays["relevant"])) <= {0, 1}, "relevant: others than 0 and 1")
    scores = arrays["candidate_scores"]
    require_array(np.nan_to_num(scores, nan=np.nan, posinf=0), np.float32, (n, depth), "scores")
    falling = (scores[:, 1:] < scores[:, :-1]).any()
    require(
        (scores[:, 0] == 0).all() and not falling, "scores of candidates fall, or begin above 0"
    )
    for name, dtype in (
        *(("relevant", np.uint8), ("totals", np.int64)),
        *(("uncertainty", np.float64), ("selection_score", np.float64)),
    ):
        require_array(arrays[name], dtype, (n, depth) if name == "relevant" else (n,), name)
    if "clusters" in arrays:
        require_array(arrays["clusters"], np.int64, (n,), "clusters")
    if labels is not None:
        require_array(labels, np.int64, (n,), "labels")
    relevant = np.count_nonzero(arrays["relevant"], axis=1)
    require((arrays["totals"] >= relevant).all(), "totals below the relevant candidates")
    require(np.isfinite(arrays["uncertainty"]).all(), "uncertainties that are not finite")
    return ScoredResults.from_arrays(arrays, groups, cluster, labels, label, keys)


def _try(rule: SetRule, gallery: Gallery, distinct: Distinct) -> None:
    """Score made-up queries: exceptions, scores that fall, and overflows show what shapes do not.

    Their uncertainties are some of the tuning split.
    """
    depth = rule.calibration.depth
    uncertainty = np.quantile(rule.tuning.require("uncertainty"), (0, 0.5, 1))
    shape = (len(uncertainty), depth)
    has_labels = gallery.labels is not None
    queries = SearchResults(
        uncertainty,
        depth,
        distances=np.broadcast_to(np.linspace(0.1, 1, depth, dtype=np.float32), shape),
        labels=np.broadcast_to(np.arange(depth) // 2, shape) if has_labels else None,
        candidate_uncertainty=None
        if gallery.uncertainty is None
        else np.full(shape, np.median(gallery.uncertainty)),
        votes=None if gallery.relevance is None or has_labels else np.ones(shape, int),
    )
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        if distinct is not None:
            queries = queries.first_of_each_label()
        ranking = rule.score_function.rank(queries)
    scores = ranking.scores
    exists = ranking.take(queries.is_candidate)
    falling = (scores[:, 1:] < scores[:, :-1]).any()
    require(
        np.isfinite(scores[exists]).all() and (scores[:, 0] == 0).all() and not falling,
        f"scores by {rule.score_function.name} are not finite, fall, or begin above 0",
    )
    require(np.isfinite(ranking.selection_score).all(), "selection scores that are not finite")
