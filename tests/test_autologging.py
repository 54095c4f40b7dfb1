"""A user's `mlflow.autolog()` logs what the user fits, and nothing that rcir fits on the way."""

import threading

import mlflow
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import rcir
from rcir.autologging import without_autologging
from rcir.data import ImageSet
from rcir.embedding import Embedding
from rcir.risk.features import fit_logistic
from training.validation import validate

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(40, 3))
POSITIVE = np.arange(40) % 2 == 0


@pytest.fixture
def logged(tmp_path, new_store, monkeypatch):
    """Turn autologging of scikit-learn on; return a function that lists the runs."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "autolog.db"))
    mlflow.sklearn.autolog(log_models=False, log_datasets=False, silent=True)
    yield lambda: mlflow.search_runs(search_all_experiments=True, output_format="list")
    mlflow.sklearn.autolog(disable=True)


def user_fits():
    return LogisticRegression().fit(VALUES, POSITIVE)


def images(count):
    pixels = RNG.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % 5, [str(row) for row in range(count)])


def calibrate():
    centres = RNG.normal(size=(20, 4))
    labels, query_labels = RNG.integers(20, size=(2, 200))
    gallery, queries = (
        centres[each] + 0.5 * RNG.normal(size=(200, 4)) for each in (labels, query_labels)
    )
    rcir.Retriever.from_embeddings(gallery, labels=labels).calibrate(queries, query_labels)


def validate_epoch():
    import torch

    vectors = torch.as_tensor(RNG.normal(size=(200, 8)), dtype=torch.float32)
    validate(Embedding(vectors), images(200)).metrics()


OWN_FITS = {
    "score function": lambda: fit_logistic(VALUES, POSITIVE),
    "calibration": calibrate,
    "epoch": validate_epoch,
}


def test_own_fits_make_no_run_and_those_of_the_user_still_do(logged):
    with mlflow.start_run() as active:
        for fit in OWN_FITS.values():
            fit()
    fit_logistic(VALUES, POSITIVE)  # without an active run
    (run,) = logged()
    assert run.info.run_id == active.info.run_id
    assert (run.data.params, run.data.metrics) == ({}, {})
    user_fits()
    first, _ = logged()  # the latest first
    assert first.data.params


def test_blocks_of_other_threads_do_not_turn_logging_on_or_off(logged):
    inside, may_end = threading.Event(), threading.Event()

    def stay_inside():
        with without_autologging():
            inside.set()
            may_end.wait(30)

    other = threading.Thread(target=stay_inside)
    other.start()
    assert inside.wait(30)
    user_fits()
    assert len(logged()) == 1
    with without_autologging():
        with without_autologging():
            pass
        may_end.set()
        other.join(30)
        user_fits()
    assert len(logged()) == 1
    user_fits()
    assert len(logged()) == 2


def test_logging_that_the_user_turned_off_stays_off(logged):
    from mlflow.utils.autologging_utils import disable_autologging

    with disable_autologging():
        fit_logistic(VALUES, POSITIVE)
        user_fits()
    assert logged() == []
