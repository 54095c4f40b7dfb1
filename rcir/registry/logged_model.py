"""A calibration as a model in MLflow: code, retriever, card, and what was measured."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcir import tracking
from rcir.errors import DataUnavailable, InvalidData
from rcir.registry.answers import IMAGE, UNCERTAINTY, VECTOR, asks_uncertainty, signature
from rcir.registry.card import card
from rcir.registry.requirements import requirements
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.runs.find import RETRIEVER
from rcir.runs.results import RESULTS, TEST

if TYPE_CHECKING:
    from rcir.data.images import ImageLike

CARD = "README.md"
CODE = Path(__file__).with_name("model_code.py")


def log_calibration(
    run: tracking.TrackedRun, output: Path, retriever: Retriever, example: dict[str, Any]
) -> str:
    """Log what a calibration wrote as the model of an MLflow run; return the model's id.

    Args:
        run: in MLflow.
        output: folder with `retriever`, `results.json` and `test.safetensors`.
        retriever: the one in it.
        example: a row of queries, see `image_example` and `vector_example`.

    Raises:
        InvalidData: what was measured is missing, or of another retriever.
    """
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / CARD
        written.write_text(card(retriever, read_results(output)))
        parts = tracking.ModelParts(
            CODE,
            storage.current_version(output / RETRIEVER),
            [written, output / RESULTS, output / TEST],
            signature(retriever),
            example,
            requirements(retriever),
        )
        return tracking.log_model(run, parts)


def read_results(folder: Path) -> dict[str, Any]:
    """The numbers of an evaluation in a folder.

    Raises:
        InvalidData: there are none.
    """
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"{folder} holds no results of a calibration ({error}): give the folder that "
            "`python -m calibration` or `rcir certify` wrote to"
        ) from error
    return results


def image_example(image: ImageLike) -> dict[str, Any]:
    """A picture as a row of queries: the bytes of its file; of pixels, those of a PNG file."""
    if isinstance(image, str | os.PathLike):
        return {IMAGE: Path(image).read_bytes()}
    if isinstance(image, bytes):
        return {IMAGE: image}
    from PIL import Image

    from rcir.data.images import read_image

    buffer = io.BytesIO()
    channels = 1 if getattr(image, "ndim", 3) == 2 else 3
    Image.fromarray(read_image(image, channels)).save(buffer, "PNG")
    return {IMAGE: buffer.getvalue()}


def vector_example(retriever: Retriever) -> dict[str, Any]:
    """The first calibration query of a retriever of vectors, as a row of queries."""
    queries = retriever.require_calibration().calibration_queries
    row: dict[str, Any] = {VECTOR: queries.vectors[0].astype(float).tolist()}
    if asks_uncertainty(retriever):
        assert queries.uncertainty is not None
        row[UNCERTAINTY] = float(queries.uncertainty[0])
    return row


def example_of(retriever: Retriever) -> dict[str, Any]:
    """A real query of a calibrated retriever: of vectors its own, else of its data set.

    Raises:
        DataUnavailable: its data set is not on this machine.
    """
    if retriever.encoder is None:
        return vector_example(retriever)
    from rcir.data import DataConfig, load_splits

    if "data" not in retriever.origin:
        raise DataUnavailable(
            "the retriever does not say of which data set it is: calibrate it with "
            "`python -m calibration`, which tracks its model in MLflow"
        )
    return image_example(load_splits(DataConfig(**retriever.origin["data"])).test.images[0])
