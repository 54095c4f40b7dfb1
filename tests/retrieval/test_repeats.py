"""A retriever is calibrated on pictures that stand nowhere else."""

import io

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet, Preprocessing
from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save


@pytest.fixture
def own(folder):
    return load(folder)


def both(first, second):
    """The images of two sets, one after the other."""
    return ImageSet(
        np.concatenate([first.images, second.images]),
        np.concatenate([first.labels, second.labels]),
        [*first.ids, *(f"again-{name}" for name in second.ids)],
    )


def test_the_tuning_split_searched_once_more_calibrates_nothing(own, splits):
    first, again = own.search_labelled(splits.tuning), own.search_labelled(splits.tuning)
    with pytest.raises(InvalidData, match=r"200 of 200 .* in the tuning split too \(rows 0, 1, 2"):
        own.calibrate(first, again, "learned")
    own.calibrate(first, again, "constant", recurring=True)
    assert own.retrieve(splits.test.images[0], 0.4, 0.1).guarantee.n_calibration == 200


def test_five_pictures_sixty_times_calibrate_nothing(own, splits):
    five = splits.calibration.subset(np.tile(np.arange(5), 60))
    first, again = own.search_labelled(splits.tuning), own.search_labelled(five)
    with pytest.raises(InvalidData, match=r"295 of 300 .* came before among them \(rows 5, 6, 7"):
        own.calibrate(first, again, "constant")
    own.calibrate(first, again, "constant", recurring=True)


@pytest.mark.parametrize("recurring", [False, True])
def test_pictures_of_the_gallery_calibrate_nothing(own, splits, recurring):
    mixed = own.search_labelled(both(splits.calibration, splits.gallery.subset(np.arange(7))))
    first = own.search_labelled(splits.tuning)
    with pytest.raises(InvalidData, match=r"7 of 407 calibration .* of the gallery \(rows 400, 40"):
        own.calibrate(first, mixed, "constant", recurring=recurring)
    with pytest.raises(InvalidData, match=r"7 of 407 queries of the tuning split are pictures of"):
        own.calibrate(mixed, first, "constant", recurring=recurring)
    # Nothing was changed by a refusal.
    assert own.retrieve(splits.test.images[0], 0.4, 0.1).guarantee.n_calibration == 400


@pytest.mark.parametrize("stored", [False, True])
def test_a_picture_that_is_added_is_known(own, splits, tmp_path, stored):
    own.add(splits.calibration.images[3:4], ["new"], [7])
    current = load(save(own, tmp_path / "added")) if stored else own
    parts = current.search_labelled(splits.tuning), current.search_labelled(splits.calibration)
    with pytest.raises(InvalidData, match=r"1 of 400 calibration queries .* gallery \(row 3\)"):
        current.calibrate(*parts, "constant")


def encoded(image, quality):
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=quality)
    file.seek(0)
    return np.asarray(Image.open(file))


def test_of_a_picture_that_was_encoded_anew_it_warns(retriever, splits):
    copies = np.stack([encoded(image, 100) for image in splits.calibration.images[:3]])
    assert not any(map(np.array_equal, copies, splits.calibration.images[:3]))
    gallery = both(splits.gallery, splits.calibration.subset(np.arange(3)))
    gallery = ImageSet(np.concatenate([splits.gallery.images, copies]), gallery.labels, gallery.ids)
    own = Retriever.build(retriever.encoder, Preprocessing(), gallery)
    parts = own.search_labelled(splits.tuning), own.search_labelled(splits.calibration)
    with pytest.warns(UserWarning, match=r"3 of 400 calibration .*\(rows 0, 1, 2\) .*another one"):
        own.calibrate(*parts, "constant")


def test_of_queries_that_were_encoded_anew_it_warns(retriever, splits, tmp_path):
    first = splits.calibration.subset(np.arange(3))
    paths = [tmp_path / f"{row}.png" for row in range(3)]
    for path, image in zip(paths, first.images, strict=True):
        Image.fromarray(image).save(path)
    files = ImageSet(paths, first.labels, [path.name for path in paths])
    own = Retriever.build(retriever.encoder, Preprocessing(), splits.gallery)
    tuning, calibration = (
        own.search_labelled(splits.tuning),
        own.search_labelled(splits.calibration),
    )
    with pytest.warns(UserWarning, match=r"3 of 3 calibration queries .* another query"):
        own.calibrate(calibration, own.search_labelled(files), "constant")
    own.calibrate(calibration, own.search_labelled(files), "constant", recurring=True)
    own.calibrate(tuning, calibration, "constant")


def test_of_a_gallery_whose_pictures_are_not_known_it_warns(retriever, splits):
    built = Retriever.build(retriever.encoder, Preprocessing(), splits.gallery)
    own = Retriever(
        *(built.encoder, built.preprocessing, built.index, built.ids.tolist()), built.relevance
    )
    assert own.digests is None
    some = both(splits.calibration, splits.gallery.subset(np.arange(2)))
    parts = own.search_labelled(splits.tuning), own.search_labelled(some)
    with pytest.warns(UserWarning, match=r"2 of 402 .*\(rows 400, 401\).* may be the same picture"):
        own.calibrate(*parts, "constant")
    own.add(splits.test.images[:1], ["new"], [7])
    assert own.digests is None


def test_what_is_known_of_the_gallery_changes_no_fingerprint(retriever, splits):
    own = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, retriever.ids.tolist()),
        *(retriever.relevance, 150, retriever.item_uncertainty),
    )
    assert own.fingerprints() == retriever.fingerprints()
    with pytest.raises(InvalidData, match="digests"):
        Retriever(
            *(retriever.encoder, retriever.preprocessing, retriever.index, retriever.ids.tolist()),
            digests=retriever.digests[:5],
        )
