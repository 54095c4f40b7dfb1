"""Calibrations whose models lie in a real MLflow store: of vectors, and of pictures."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from calibration import CalibrationConfig, CertificationConfig, calibrate, certify
from rcir.retrieval.retriever import Retriever

N_GALLERY, N_QUERIES, KINDS = 200, 800, 6
ALPHAS = (0.1, 0.2)


@dataclass(frozen=True)
class Logged:
    """A calibration: its folder, its retriever, queries for it, its MLflow run and model."""

    folder: Path
    retriever: Retriever
    queries: list
    run: str
    uri: str


def write(folder, seed=0):
    """Write two embeddings of the same gallery and queries, the second of them noisier, to files
    (`fine-gallery.npz`, ...); return them.
    """
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((KINDS, 8))
    kinds = [rng.integers(KINDS, size=n) for n in (N_GALLERY, N_QUERIES)]
    fine = [centres[kind] + rng.standard_normal((len(kind), 8)) for kind in kinds]
    coarse = [each + 1.2 * rng.standard_normal(each.shape) for each in fine]
    embeddings = {"fine": fine, "coarse": coarse}
    for name, vectors in embeddings.items():
        for part, kind, values in zip(("gallery", "queries"), kinds, vectors, strict=True):
            ids = np.array([f"{part} {row}" for row in range(len(kind))])
            labels = np.array([f"kind {number}" for number in kind])
            arrays = {"vector": values.astype(np.float32), "id": ids, "label": labels}
            np.savez(folder / f"{name}-{part}.npz", **arrays)
    return embeddings


def certified(folder, name, **changed):
    """One of the two, certified by `rcir certify`."""
    options = {"score_function": "quantile", "alphas": ALPHAS, "depth": 60} | changed
    files = {part: str(folder / f"{name}-{part}.npz") for part in ("gallery", "queries")}
    return certify(CertificationConfig(**files, output=str(folder / name), **options))


def logged(outcome, queries):
    run = outcome.retriever.origin["calibration"]
    (model,) = MlflowClient().get_run(run).outputs.model_outputs
    uri = f"models:/{model.model_id}"
    return Logged(outcome.folder.parent, outcome.retriever, queries, run, uri)


@pytest.fixture(scope="session")
def certifications(tracking_uri, tmp_path_factory):
    """Certified vectors by name, "fine" and "coarse"; to be read only."""
    folder = tmp_path_factory.mktemp("certified")
    embeddings = write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        return {
            name: logged(certified(folder, name), vectors[1][:20].astype(np.float32))
            for name, vectors in embeddings.items()
        }


@pytest.fixture(scope="session")
def pictured(trained, tracking_uri, tmp_path_factory):
    """Calibrated pictures; to be read only."""
    output = tmp_path_factory.mktemp("pictured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        config = CalibrationConfig(
            str(trained.path), str(output), score_function="minmax", alphas=(0.2, 0.3)
        )
        outcome = calibrate(config)
        return logged(outcome, list(outcome.splits.data.test.images[:5]))


@pytest.fixture(scope="session")
def both(certifications, pictured):
    """One of each kind."""
    return {"vectors": certifications["fine"], "pictures": pictured}
