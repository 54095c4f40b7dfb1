"""Tests of every index on a server, by the fixture `config`."""

from pathlib import Path

import numpy as np
import pytest

from calibration import (
    CalibrationConfig,
    CertificationConfig,
    calibrate,
    certify,
    indexing,
    pipeline,
    reindex,
)
from rcir import Retriever
from rcir.errors import DataUnavailable, InvalidData, StaleCalibration
from rcir.index import build_index
from tests.index.test_indexes import saved, vectors


def test_what_is_dropped_is_gone_and_its_name_is_free(config, tmp_path):
    index = build_index(vectors(20), config)
    loaded = saved(index, config, tmp_path / "index")
    index.drop()
    for one in (index, loaded):
        with pytest.raises(DataUnavailable):
            one.search(vectors(1), 1)
    assert len(build_index(vectors(7), config)) == 7


def test_what_somebody_else_changed_is_not_dropped(config, tmp_path):
    index = build_index(vectors(20), config)
    loaded = saved(index, config, tmp_path / "index")
    loaded.add(vectors(1, seed=1))
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.drop()
    assert loaded.search(vectors(1, seed=1), 1)[1].tolist() == [[20]]


def failing(*_):
    raise KeyboardInterrupt


def certified(index):
    """Fails, for five queries calibrate nothing."""
    np.savez("gallery.npz", vector=vectors(60), label=np.arange(60) % 3)
    np.savez("queries.npz", vector=vectors(5, seed=1), label=np.arange(5) % 3)
    with pytest.raises(InvalidData, match="can be certified"):
        certify(CertificationConfig("gallery.npz", "queries.npz", depth=20, index=index))


def reindexed(index, owner=Retriever, name="recalibrate", work=failing):
    """Fails when the calibration queries are searched."""
    labels = np.arange(360) % 3
    points = vectors(360) + 4 * np.eye(3, 7, dtype=np.float32)[labels]
    retriever = Retriever.from_embeddings(points[:60], labels=labels[:60], depth=20)
    retriever.calibrate(points[60:], labels[60:], "constant")
    folder = retriever.save(Path("retriever"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, work)
        with pytest.raises(KeyboardInterrupt):
            reindex(folder, index)


def compared(index):
    """Fails when the index is measured, after the exact one."""
    turns = iter([indexing.crossed_sizes, failing])
    reindexed(index, indexing, "crossed_sizes", lambda *given: next(turns)(*given))


def calibrated(index, trained):
    """Fails when the queries are searched."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "search_splits", failing)
        with pytest.raises(KeyboardInterrupt):
            calibrate(CalibrationConfig(str(trained.path), "output", depth=20, index=index))


@pytest.mark.parametrize("work", [certified, compared, reindexed, calibrated])
def test_nothing_is_left_of_an_index_whose_calibration_failed(config, work, request):
    more = [request.getfixturevalue("trained")] if work is calibrated else []
    work(config, *more)
    assert len(build_index(vectors(7), config)) == 7  # what is there would be left alone
