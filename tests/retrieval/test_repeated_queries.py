"""Calibration queries must not stand in the gallery, in the tuning split or twice."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet
from rcir.errors import InvalidData
from rcir.retrieval.calibration import known_digests
from rcir.retrieval.retriever import Retriever
from tests.retrieval.retrievers import build, calibrate, guarantee, search
from tests.retrieval.whole_numbers import CALIBRATION, FURTHER, GALLERY, TUNING


@pytest.fixture
def own():
    return calibrate(build())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (TUNING[np.arange(200)], r"200 of 200 .* tuning split"),
        (CALIBRATION[np.tile(np.arange(5), 60)], r"295 of 300 .*\(rows 5, 6, 7"),
    ],
    ids=["of the tuning split", "sixty times each"],
)
def test_repeated_queries_calibrate_only_if_they_recur(own, part, message):
    first, again = search(own, TUNING), search(own, part)
    with pytest.raises(InvalidData, match=message):
        own.calibrate_splits(first, again, "constant")
    own.calibrate_splits(first, again, "constant", recurring=True)
    assert guarantee(own, 0.4).n_calibration == len(part)


@pytest.mark.parametrize("recurring", [False, True])
def test_gallery_items_never_tune_or_calibrate(own, recurring):
    mixed, first = search(own, CALIBRATION + GALLERY[:7]), search(own, TUNING)
    before = guarantee(own, 0.4)
    with pytest.raises(InvalidData, match=r"7 of 407 calibration .* gallery \(rows 400, 401"):
        own.calibrate_splits(first, mixed, "constant", recurring=recurring)
    with pytest.raises(InvalidData, match=r"7 of 407 .* tuning split .* gallery"):
        own.calibrate_splits(mixed, first, "constant", recurring=recurring)
    # The refusals changed nothing.
    assert guarantee(own, 0.4) == before


@pytest.mark.parametrize("stored", [False, True])
def test_an_added_image_no_longer_calibrates(loaded, splits, tmp_path, stored):
    loaded.add(splits.calibration.images[3:4], ["new"], [7])
    own = Retriever.load(loaded.save(tmp_path / "added")) if stored else loaded
    parts = own.search_labelled(splits.tuning), own.search_labelled(splits.calibration)
    with pytest.raises(InvalidData, match=r"1 of 400 .* gallery \(row 3\)"):
        own.calibrate_splits(*parts, "constant")


def test_near_copies_of_gallery_items_cause_a_warning(own):
    copies = replace(GALLERY[:3], vectors=GALLERY[:3].vectors + np.float32(1 / 64))
    parts = search(own, TUNING), search(own, CALIBRATION + copies)
    with pytest.warns(UserWarning, match=r"3 of 403 calibration .*\(rows 400, 401, 402\)"):
        own.calibrate_splits(*parts, "constant")


def test_images_in_another_format_cause_a_warning_unless_they_recur(loaded, splits, tmp_path):
    """The digest of a file is not that of its pixels."""
    first = splits.calibration.subset(np.arange(3))
    paths = [tmp_path / f"{row}.png" for row in range(3)]
    for path, image in zip(paths, first.images, strict=True):
        Image.fromarray(image).save(path)
    files = ImageSet(paths, first.labels, [path.name for path in paths])
    calibration = loaded.search_labelled(splits.calibration)
    with pytest.warns(UserWarning, match=r"3 of 3 calibration queries .* another query"):
        loaded.calibrate_splits(calibration, loaded.search_labelled(files), "constant")
    loaded.calibrate_splits(calibration, loaded.search_labelled(files), "constant", recurring=True)


def test_a_gallery_without_digests_causes_a_warning(retriever, splits):
    gallery = replace(retriever.searcher.gallery, digests=None)
    own = Retriever(replace(retriever.searcher, gallery=gallery))
    queries = own.search_labelled(splits.tuning), own.search_labelled(splits.gallery)
    with pytest.warns(UserWarning, match="may be the same"):
        own.calibrate_splits(*queries, "constant")


def test_gallery_items_and_calibration_queries_are_no_evidence_for_further_queries(own):
    digests = set(known_digests(own.searcher, own.calibration).tolist())
    assert len(digests) == len(GALLERY) + len(TUNING) + len(CALIBRATION)
    assert set(own.searcher.digests.ravel().tolist()) < digests


def divided(retriever, rows, **options):
    """The tuning queries of a division, in no order."""
    retriever.calibrate(
        FURTHER.vectors[rows], FURTHER.labels[rows], "constant", tuning="queries", **options
    )
    return set(map(tuple, retriever.calibration.tuning_queries.vectors.tolist()))


def test_the_queries_alone_decide_their_division_unless_a_seed_does():
    rows = np.random.default_rng(0).permutation(len(FURTHER))
    first, again = build(uncertainty=None), build(uncertainty=None)
    assert divided(first, rows) == divided(again, rows[::-1])
    assert guarantee(again, 0.5).seed is None
    assert divided(again, rows, seed=1) != divided(first, rows)
    assert "seed 1" in str(guarantee(again, 0.5))


def test_queries_that_calibrate_again_keep_their_past(tmp_path):
    own = build(uncertainty=None)
    halves = np.split(np.random.default_rng(0).permutation(len(FURTHER)), 2)
    divided(own, halves[0])
    own.calibration = replace(own.calibration, chosen_among=3)
    with pytest.warns(UserWarning, match="calibration 2 of") as caught:
        divided(own, halves[0], seed=5)
    assert caught[0].filename == __file__
    loaded = Retriever.load(own.save(tmp_path / "own"))
    for one in (own, loaded):
        stated = guarantee(one, 0.5)
        assert (stated.chosen_among, stated.attempts) == (3, 2)
        assert "calibration 2 of" in str(stated)
    divided(loaded, halves[1])  # others
    assert (guarantee(loaded, 0.5).chosen_among, guarantee(loaded, 0.5).attempts) == (1, 1)
    with pytest.warns(UserWarning, match="calibration 3 of"):
        divided(loaded, halves[0][:150])  # some of the first
    assert guarantee(loaded, 0.5).chosen_among == 3


def test_other_tuning_queries_are_other_choices(own):
    calibration = search(own, CALIBRATION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(own)  # the same again
    with pytest.warns(UserWarning, match="calibration 2 of"):
        own.calibrate_splits(
            search(own, TUNING[:150]), calibration, "quantile", query_uncertainty="encoder"
        )
