"""Calibration queries must not stand in the gallery, in the tuning split or twice."""

import io

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet, Preprocessing
from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever


def test_the_tuning_split_calibrates_only_if_it_recurs(loaded, splits):
    first, again = loaded.search_labelled(splits.tuning), loaded.search_labelled(splits.tuning)
    with pytest.raises(InvalidData, match=r"200 of 200 .* tuning split"):
        loaded.calibrate(first, again, "constant")
    loaded.calibrate(first, again, "constant", recurring=True)
    assert loaded.guarantee(0.4, 0.1).n_calibration == 200


def test_repeated_images_calibrate_only_if_they_recur(loaded, splits):
    five = splits.calibration.subset(np.tile(np.arange(5), 60))
    first, again = loaded.search_labelled(splits.tuning), loaded.search_labelled(five)
    with pytest.raises(InvalidData, match=r"295 of 300 .*\(rows 5, 6, 7"):
        loaded.calibrate(first, again, "constant")
    loaded.calibrate(first, again, "constant", recurring=True)


@pytest.mark.parametrize("recurring", [False, True])
def test_gallery_images_never_tune_or_calibrate(loaded, splits, joined, recurring):
    mixed = joined(splits.calibration, splits.gallery.subset(np.arange(7)))
    mixed, first = loaded.search_labelled(mixed), loaded.search_labelled(splits.tuning)
    before = loaded.guarantee(0.4, 0.1)
    with pytest.raises(InvalidData, match=r"7 of 407 calibration .* gallery \(rows 400, 401"):
        loaded.calibrate(first, mixed, "constant", recurring=recurring)
    with pytest.raises(InvalidData, match=r"7 of 407 .* tuning split .* gallery"):
        loaded.calibrate(mixed, first, "constant", recurring=recurring)
    # The refusals changed nothing.
    assert loaded.guarantee(0.4, 0.1) == before


@pytest.mark.parametrize("stored", [False, True])
def test_an_added_image_no_longer_calibrates(loaded, splits, tmp_path, stored):
    loaded.add(splits.calibration.images[3:4], ["new"], [7])
    own = Retriever.load(loaded.save(tmp_path / "added")) if stored else loaded
    parts = own.search_labelled(splits.tuning), own.search_labelled(splits.calibration)
    with pytest.raises(InvalidData, match=r"1 of 400 .* gallery \(row 3\)"):
        own.calibrate(*parts, "constant")


def encoded(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=100)
    file.seek(0)
    return np.asarray(Image.open(file))


def test_images_encoded_anew_in_the_gallery_cause_a_warning(retriever, splits, joined):
    some = splits.calibration.subset(np.arange(3))
    copies = ImageSet(np.stack([encoded(image) for image in some.images]), some.labels, some.ids)
    assert not any(map(np.array_equal, copies.images, some.images))
    gallery = joined(splits.gallery, copies)
    own = Retriever.build(retriever.encoder, Preprocessing(), gallery)
    parts = own.search_labelled(splits.tuning), own.search_labelled(splits.calibration)
    with pytest.warns(UserWarning, match=r"3 of 400 calibration .*\(rows 0, 1, 2\)"):
        own.calibrate(*parts, "constant")


def test_queries_encoded_anew_cause_a_warning_unless_they_recur(loaded, splits, tmp_path):
    first = splits.calibration.subset(np.arange(3))
    paths = [tmp_path / f"{row}.png" for row in range(3)]
    for path, image in zip(paths, first.images, strict=True):
        Image.fromarray(image).save(path)
    files = ImageSet(paths, first.labels, [path.name for path in paths])
    calibration = loaded.search_labelled(splits.calibration)
    with pytest.warns(UserWarning, match=r"3 of 3 calibration queries .* another query"):
        loaded.calibrate(calibration, loaded.search_labelled(files), "constant")
    loaded.calibrate(calibration, loaded.search_labelled(files), "constant", recurring=True)


def test_a_gallery_without_digests_causes_a_warning(retriever, splits, joined):
    parts = retriever.encoder, retriever.preprocessing, retriever.index
    own = Retriever(*parts, splits.gallery.ids, splits.gallery.labels)
    some = joined(splits.calibration, splits.gallery.subset(np.arange(2)))
    queries = own.search_labelled(splits.tuning), own.search_labelled(some)
    with pytest.warns(UserWarning, match=r"2 of 402 .*\(rows 400, 401\).* may be the same"):
        own.calibrate(*queries, "constant")


def test_digests_of_the_gallery_change_no_fingerprint(retriever, splits):
    parts = retriever.encoder, retriever.preprocessing, retriever.index
    own = Retriever(
        *(*parts, splits.gallery.ids, splits.gallery.labels, 150, retriever.item_uncertainty)
    )
    assert own.digests is None
    assert own.fingerprints() == retriever.fingerprints()
