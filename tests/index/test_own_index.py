"""An index of somebody's own (`tests/index/brute.py`): built, calibrated, stored, loaded, asked."""

import json
import subprocess
import sys

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig, StaleCalibration
from rcir.index import INDEXES, IndexConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import save
from tests.index.brute import BruteIndex, BruteOptions

OWN = "tests.index.brute:BruteIndex"


@pytest.fixture(scope="module", params=["import path", "table"])
def built(request, retriever, splits):
    """The fixture's retriever with another index, under a name or by its path."""
    name = OWN
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "table":
            name = "brute"
            patch.setitem(INDEXES, name, OWN)
        own = Retriever.build(
            *(retriever.encoder, retriever.preprocessing, splits.gallery, 150),
            index=IndexConfig(name, {"block": 50}),
        )
        own.calibrate(
            own.search_labelled(splits.tuning, "occluded"),
            own.search_labelled(splits.calibration, "occluded"),
            score_function="quantile",
        )
        yield own


def test_it_answers_as_the_exact_index_does(built, retriever, splits):
    assert isinstance(built.index, BruteIndex)
    images = list(splits.test.images)
    found, expected = (each.search(images) for each in (built, retriever))
    np.testing.assert_allclose(found.distances, expected.distances, atol=1e-5)
    for answer, other in zip(
        built.retrieve(images, 0.3, 0.1), retriever.retrieve(images, 0.3, 0.1), strict=True
    ):
        assert answer.guarantee.threshold == pytest.approx(other.guarantee.threshold)
        assert answer.ids[0] == other.ids[0]
        assert answer.size == other.size


def test_it_survives_saving(built, splits, tmp_path):
    folder = save(built, tmp_path / "retriever")
    loaded = rcir.load(folder)
    assert isinstance(loaded.index, BruteIndex)
    assert loaded.index.options == BruteOptions(block=50)
    images = list(splits.test.images[:20])
    for options in ({}, {"distinct": "label"}, {"group": "True"}):
        before, after = (
            [each.to_dict() for each in one.retrieve(images, 0.6, 0.1, **options)]
            for one in (built, loaded)
        )
        assert before == after
    assert sorted(path.name for path in (folder / "index" / "parts").iterdir()) == [
        "first.npy",
        "rest.npy",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "index/parts/first.npy" in manifest["files"]
    save(loaded, folder)  # it is known as a retriever, with folders in folders
    loaded.add([np.zeros((8, 16), np.uint8)], ["black"], [0])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        loaded.retrieve(images[0], 0.3, 0.1)


@pytest.mark.slow
def test_where_it_is_absent_it_is_refused_in_words(built, tmp_path):
    folder = save(built, tmp_path / "retriever")
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.modules['tests'] = None; import rcir\n"
            f"try: rcir.load({str(folder)!r})\nexcept rcir.RcirError as error: print(error)",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"index.kind {OWN!r} cannot be imported" in process.stdout, process.stderr
    assert "PYTHONPATH" in process.stdout


def test_what_could_not_be_loaded_is_not_saved(retriever, splits, tmp_path):
    class Local(BruteIndex):
        pass

    vectors = retriever.search(splits.gallery.images).vectors
    index = Local.build(vectors, BruteOptions())
    own = Retriever(retriever.encoder, retriever.preprocessing, index, splits.gallery.ids)
    with pytest.raises(InvalidConfig, match="Local"):
        save(own, tmp_path / "retriever")
    assert list(tmp_path.iterdir()) == []
