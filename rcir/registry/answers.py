"""A retriever asked by tables: which columns come in and go out, and with which parameters.

Types are as MLflow writes them in a model's signature. Whole pictures travel as the bytes of their
files, in JSON in base64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever
from rcir.risk.request import request_options

if TYPE_CHECKING:
    from pandas import DataFrame

IMAGE, VECTOR, UNCERTAINTY = "image", "vector", "uncertainty"
TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}  # as MLflow names them
# Type and default of each option of a request.
PARAMETERS: Mapping[str, tuple[str, Any]] = {
    one.name: (TYPES[one.kind], one.default) for one in request_options()
}


def signature(retriever: Retriever) -> dict[str, list[dict[str, Any]]]:
    """The columns of queries ("inputs") and answers ("outputs"), and the parameters ("params").

    Queries are an `image` each or, without an encoder, a `vector`, with its `uncertainty` where
    those that calibrated had theirs.

    Example:
        >>> import rcir
        >>> retriever = rcir.Retriever.from_embeddings(np.eye(4))
        >>> [column["name"] for column in signature(retriever)["inputs"]]
        ['vector']
    """
    if retriever.encoder is not None:
        inputs = [_column(IMAGE, "binary")]
    else:
        inputs = [_list_column(VECTOR, "double")]
        if asks_uncertainty(retriever):
            inputs.append(_column(UNCERTAINTY, "double"))
    outputs = [_list_column("ids", "string")]
    if retriever.labels is not None:
        outputs.append(_list_column("labels", "string" if retriever.label_names else "long"))
    outputs += [
        _list_column("distances", "double"),
        _column("size", "long"),
        _column("abstained", "boolean"),
    ]
    if retriever.labels is not None:
        outputs.append(_column("covered", "boolean"))
    outputs += [
        _column(UNCERTAINTY, "double"),
        _column("guarantee", "string"),
    ]
    params = [
        {"name": name, "type": kind, "default": value, "shape": None}
        for name, (kind, value) in PARAMETERS.items()
    ]
    return {"inputs": inputs, "outputs": outputs, "params": params}


def asks_uncertainty(retriever: Retriever) -> bool:
    """Return whether vectors are queried with an uncertainty of their own."""
    if retriever.calibration is None or retriever.encoder is not None:
        return False
    return retriever.calibration.calibration_queries.uncertainty is not None


def answers(retriever: Retriever, table: DataFrame, params: Mapping[str, Any]) -> DataFrame:
    """The answer to each row of a table, as `Retriever.retrieve` gives it.

    Args:
        retriever: calibrated.
        table: with the columns of `signature`; an `image` is the bytes of a file.
        params: some of `PARAMETERS`; the others have their values from there.

    Returns:
        A row for each query: ids, labels (if items have them), distances, size, abstained, covered
        (if items have labels), uncertainty of the query, and the sentence of the guarantee.

    Raises:
        InvalidData: the vectors are not of one length.
        RcirError: as `Retriever.retrieve` does.
    """
    from pandas import DataFrame

    asked = {name: value for name, (_, value) in PARAMETERS.items()} | dict(params)
    alpha, delta = asked.pop("alpha"), asked.pop("delta")
    if retriever.encoder is not None:
        found = retriever.retrieve(table[IMAGE].tolist(), alpha, delta, **asked)
    else:
        lengths = sorted({len(vector) for vector in table[VECTOR]})
        if len(lengths) > 1:
            raise InvalidData(f"vectors of {lengths} numbers: give all queries the same length")
        vectors: Any = np.array(table[VECTOR].tolist(), np.float64)
        if asks_uncertainty(retriever):
            asked["uncertainty"] = table[UNCERTAINTY].to_numpy(np.float64)
        found = retriever.retrieve(vectors, alpha, delta, **asked)
    rows = [
        {
            "ids": list(answer.ids),
            "labels": None if answer.labels is None else list(answer.labels),
            "distances": [float(distance) for distance in answer.distances],
            "size": answer.size,
            "abstained": answer.abstained,
            "covered": answer.covered,
            UNCERTAINTY: float(answer.uncertainty),
            "guarantee": str(answer.guarantee),
        }
        for answer in found
    ]
    return DataFrame(rows, columns=[column["name"] for column in signature(retriever)["outputs"]])


def _column(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "required": True}


def _list_column(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": "array", "items": {"type": kind}, "required": True}
