"""Division of a data set into training, validation, gallery, tuning, calibration and test."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rcir.data import cluster_warning
from rcir.data.division import divide, draw_by_cluster, draw_gallery
from rcir.data.records import ImageSet, Source, Splits
from rcir.data.relevance import SameLabel, SharedLabel, WithinRadius
from rcir.errors import InvalidConfig, InvalidData

QUERIES = ("tuning", "calibration", "test")


def part(counts, name, first=0):
    """Images sorted by class, `counts` of each; a pixel identifies the image."""
    labels = np.repeat(np.arange(first, first + len(counts)), counts)
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None]
    return ImageSet(pixels, labels, [f"{name}-{n}" for n in range(len(labels))])


def part_of_places(positions, name, radius=25.0):
    names = [f"{name}-{i}" for i in range(len(positions))]
    relevance = WithinRadius(np.asarray(positions, float), radius)
    return ImageSet(np.zeros((len(names), 1, 1), np.uint8), None, names, {}, relevance)


def random_places(n, name):
    return part_of_places(np.random.default_rng(n).uniform(0, 100, (n, 2)), name)


TRAIN = [6] * 20
EVALUATION = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 20, 1]


def zero_shot(train=TRAIN, evaluation=EVALUATION):
    """The queries show other classes than the training images."""
    return Source(part(train, "train"), part(evaluation, "query", first=len(train)), "queries")


def closed():
    return Source(part(TRAIN, "train"), part([3] * 20, "query"), "train")


def published():
    return Source(part(TRAIN, "train"), part([3] * 20, "query"), part([2] * 20, "gallery"))


SOURCES = [zero_shot, closed, published]


def clustered(source, clusters):
    """The same data set, its queries with the attribute "hand"."""
    return replace(source, queries=replace(source.queries, attributes={"hand": clusters}))


def ids(splits):
    return [name for images in vars(splits).values() for name in images.ids]


def divided_classes(splits):
    """The classes of the training and of the validation images."""
    return set(splits.train.labels), set(splits.validation.labels)


# Every kind of set


@pytest.mark.parametrize("source", SOURCES)
def test_every_image_is_in_one_part_with_its_label(source):
    source = source()
    splits, again, other = (divide(source, seed=seed) for seed in (5, 5, 6))
    assert ids(splits) == ids(again)
    halves = [source.train, source.queries]
    if isinstance(source.gallery, ImageSet):
        halves.append(source.gallery)
        assert splits.gallery is source.gallery
    row_of = {name: (half, row) for half in halves for row, name in enumerate(half.ids)}
    assert sorted(ids(splits)) == sorted(row_of)
    for name, images in vars(splits).items():
        assert len(images) > 0
        rows = [row_of[identifier] for identifier in images.ids]
        assert images.labels.tolist() == [half.labels[row] for half, row in rows]
        assert images.images.tolist() == [half.images[row].tolist() for half, row in rows]
        if name != "gallery":
            expected = source.queries if name in QUERIES else source.train
            assert all(half is expected for half, _ in rows)
            assert set(images.ids) != set(getattr(other, name).ids) or name == "train"
    splits = divide(source, tuning=11, calibration=11)
    for name in QUERIES:  # in order of class, labels would never fall
        assert (np.diff(getattr(splits, name).labels) < 0).sum() > 2


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (closed, {}, [48, 12, 60, 18, 18, 24]),
        (closed, {"validation": 7, "gallery": 11, "tuning": 1}, [102, 7, 11, 1, 18, 41]),
        (closed, {"validation": 0.05, "gallery": 0.2, "tuning": 0.25}, [90, 6, 24, 15, 18, 27]),
        (closed, {"validation": 59, "gallery": 60}, [1, 59, 60, 18, 18, 24]),
        (closed, {"tuning": 30, "calibration": 29}, [48, 12, 60, 30, 29, 1]),
        (closed, {"tuning": 1, "calibration": 0.5}, [48, 12, 60, 1, 30, 29]),
        (published, {}, [108, 12, 40, 18, 18, 24]),
        (published, {"gallery": 3, "validation": 0.001}, [119, 1, 40, 18, 18, 24]),
        (closed, {"tuning": 0.001, "calibration": 0.001}, [48, 12, 60, 1, 1, 58]),
    ],
)
def test_parts_have_the_requested_sizes(source, options, expected):
    splits = divide(source(), **options)
    assert [len(images) for images in vars(splits).values()] == expected
    if source is closed:
        assert all(name.startswith("train") for name in splits.gallery.ids)


# The gallery of a zero-shot set


@pytest.mark.parametrize("gallery", [0.5, 0.25, 0.07, 0.9])
def test_the_share_of_every_class_is_searched_rounded_up(gallery):
    splits = divide(zero_shot(), gallery=gallery, tuning=1, calibration=1)
    assert Counter(splits.gallery.labels.tolist()) == {
        label: math.ceil(round(gallery * count, 9)) for label, count in enumerate(EVALUATION, 20)
    }
    for name in QUERIES:  # singleton classes are never queries
        assert not {20, 30, 32} & set(getattr(splits, name).labels)


def test_a_share_is_exact_where_floating_point_is_not():
    source = zero_shot(evaluation=[100, 100])
    assert 0.07 * 100 > 7
    for gallery in (0.07, 14):
        searched = Counter(divide(source, gallery=gallery).gallery.labels.tolist())
        assert searched == {20: 7, 21: 7}


@pytest.mark.parametrize("number", [13, 14, 20, 39, 74])
def test_a_number_of_gallery_images_is_met_and_spread_over_the_classes(number):
    counts = np.array(EVALUATION)
    gallery = divide(zero_shot(), gallery=number, tuning=1, calibration=1).gallery
    searched = Counter(gallery.labels.tolist())
    n = np.array([searched[label] for label in range(20, 33)])
    assert n.sum() == number
    assert (n >= 1).all()
    # Moving an image to another class would not make the shares more even.
    assert ((n - 1) / counts).max() <= (n / counts).min() + 1e-9


# Validation


@pytest.mark.parametrize(
    ("classes", "each", "validation", "n"),
    [
        *[(20, 6, 0.1, 3), (20, 6, 0.5, 10), (20, 6, 3, 3), (5, 2, 0.1, 2), (5, 9, 1, 1)],
        *[(6, 3, 0.1, 3), (9, 3, 0.1, 3)],  # a share of the classes is at least three
    ],
)
def test_validation_has_classes_of_its_own_in_a_zero_shot_set(classes, each, validation, n):
    splits = divide(zero_shot([each] * classes, [3] * 5), validation=validation)
    trains, validates = divided_classes(splits)
    assert (len(trains), len(validates), trains & validates) == (classes - n, n, set())
    assert len(splits.validation) == each * n


def test_whole_classes_validate_where_the_queries_show_other_classes():
    """As in Market-1501: no person is in both halves, and the gallery is published."""
    queries, gallery = part([3] * 20, "query", first=20), part([2] * 25, "gallery", first=18)
    splits = divide(Source(part(TRAIN, "train"), queries, gallery), validation=0.2)
    trains, validates = divided_classes(splits)
    assert (len(trains), len(validates), trains & validates) == (16, 4, set())
    assert len(splits.validation) == 24


@pytest.mark.parametrize("seed", range(5))
def test_three_classes_with_a_match_validate_among_many_singletons(seed):
    """Half of the pictures of LFW show people with one picture."""
    splits = divide(zero_shot([1] * 40 + [2] * 4, [2] * 9), seed=seed)
    counts = np.unique(splits.validation.labels, return_counts=True)[1]
    assert (len(counts), (counts == 2).sum() >= 3) == (4, True)  # a tenth of 44
    trains, validates = divided_classes(splits)
    assert not trains & validates


@pytest.mark.parametrize(
    ("counts", "share", "validates"),
    [
        ([5] * 2, 0.1, [2, 2]),
        ([4] * 3, 0.1, [2, 2, 2]),
        ([30, 20, 10], 0.1, [3, 2, 2]),
        ([30, 20, 10, 4, 3], 0.5, [15, 10, 5, 2, 0]),
        ([4, 4, 4], 0.9, [2, 2, 2]),
    ],
)
def test_images_of_each_class_validate_where_classes_are_few(counts, share, validates):
    n, source = len(counts), zero_shot(counts, [3] * 3)
    splits = divide(source, validation=share)
    assert np.bincount(splits.validation.labels, minlength=n).tolist() == validates
    assert set(splits.train.labels) == set(range(n))
    assert sorted(splits.train.ids + splits.validation.ids) == sorted(source.train.ids)


def test_shared_labels_have_no_classes_and_validate_as_images():
    def half(n, name):
        relevance = SharedLabel.from_lists([[i % 5, 5] for i in range(n)], 6)
        names = [f"{name}-{i}" for i in range(n)]
        return ImageSet(np.zeros((n, 1, 1), np.uint8), None, names, {}, relevance)

    splits = divide(Source(half(50, "train"), half(40, "query"), half(20, "gallery")))
    assert (len(splits.validation), len(splits.train)) == (5, 45)


# Places


def test_images_of_places_keep_their_places():
    source = Source(random_places(50, "train"), random_places(40, "query"), "queries")
    splits = divide(source, validation=0.2, gallery=0.5, tuning=5, calibration=6)
    assert [len(getattr(splits, name)) for name in ("gallery", *QUERIES)] == [20, 5, 6, 9]
    assert len(set(ids(splits))) == 90
    assert 5 <= len(splits.validation) <= 15
    for images, half in ((splits.train, source.train), (splits.test, source.queries)):
        rows = [half.ids.index(name) for name in images.ids]
        np.testing.assert_array_equal(images.relevance.places, half.relevance.places[rows])


@pytest.mark.parametrize(("seed", "validation"), [(0, 0.1), (1, 0.3), (2, 400)])
def test_validation_places_match_each_other_and_lie_apart_from_training(seed, validation):
    """A city of 8 x 6 km in which every place was photographed about four times."""
    rng = np.random.default_rng(seed)
    corners = np.repeat(rng.uniform(0, [8000, 6000], (1000, 2)), 4, axis=0)
    city = 5e5 + corners + rng.normal(0, 4, corners.shape)
    train = part_of_places(city, "train")
    source = Source(train, random_places(60, "query"), random_places(30, "gallery"))
    splits = divide(source, seed=seed, validation=validation)
    wanted = validation if validation > 1 else validation * 4000
    assert 0.5 * wanted <= len(splits.validation) <= 1.5 * wanted
    assert len(splits.validation) + len(splits.train) == 4000
    where, trains = splits.validation.relevance, splits.train.relevance
    assert (where.totals(where) > 1).mean() > 0.95
    # Of images drawn one by one nearly all would have a neighbour on the other side.
    assert (where.totals(trains) > 0).mean() < 0.3


def test_cities_with_the_same_coordinates_are_divided_as_wholes():
    """The third coordinate separates the cities."""
    rng = np.random.default_rng(0)
    city = np.column_stack([rng.uniform(0, 900, (400, 2)), 1e6 * np.repeat(np.arange(8), 50)])
    other = part_of_places(rng.uniform(0, 90, (40, 3)), "query")
    splits = divide(Source(part_of_places(city, "train"), other, other), validation=0.25)
    kinds = [set(images.relevance.places[:, 2]) for images in (splits.train, splits.validation)]
    assert (len(kinds[0]), len(kinds[1]), kinds[0] & kinds[1]) == (6, 2, set())


# Refusals


@pytest.mark.parametrize("source", [zero_shot, closed])
@pytest.mark.parametrize("name", ["validation", "tuning", "calibration", "gallery"])
def test_an_empty_part_or_a_broken_number_is_refused(source, name):
    for share in (0, -2, 1.5, math.nan, math.inf, True):
        with pytest.raises(InvalidData, match=f"^{name} is"):
            divide(source(), **{name: share})


ONE_HAND, SIX_HANDS = (clustered(closed(), np.arange(60) % n) for n in (1, 6))


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        *[(closed, {"validation": 60, "gallery": 60}, "120 images")],
        *[(closed, {"validation": 0.5}, "gallery"), (published, {"validation": 120}, "120")],
        *[(published, dict.fromkeys(("tuning", "calibration"), 0.5), "60 queries")],
        *[(published, {"tuning": 30, "calibration": 30}, "60 queries")],
        *[(zero_shot, {"validation": 20}, "20 classes"), (zero_shot, {"gallery": 12}, "13 cla")],
        *[(zero_shot, {"gallery": 77}, "77 images"), (zero_shot, {"gallery": 900}, "77 images")],
        (zero_shot([4], [4] * 3), {}, "at least 2 classes"),
        (zero_shot([4] * 9, [1] * 7), {}, "one image"),
        (zero_shot([4] * 9, [1] * 7), {"validation": 900}, "one image"),
        (zero_shot([4] * 9, [1] * 7), {"tuning": 900}, "one image"),
        (zero_shot([4] * 9, [3] * 7), {"gallery": 0.9}, "all of their 21"),
        (ONE_HAND, {"cluster": "hand"}, "1 clusters"),
        (SIX_HANDS, {"cluster": "hand", "tuning": 21, "calibration": 30}, "6 clusters"),
        (SIX_HANDS, {"cluster": "hand", "calibration": 0}, "calibration is 0"),
    ],
)
def test_parts_that_leave_nothing_over_are_refused(source, options, word):
    with pytest.raises(InvalidData, match=word):
        divide(source() if callable(source) else source, **options)


def test_places_that_cannot_be_separated_are_refused():
    other, same = random_places(40, "query"), part_of_places(np.zeros((30, 2)), "train")
    for options in ({}, {"validation": 30}):
        with pytest.raises(InvalidData, match="validation"):
            divide(Source(same, other, other), **options)


# Clusters of queries


def hands(images):
    return set(images.attributes["hand"].tolist())


@pytest.mark.parametrize("source", SOURCES)
def test_queries_of_one_cluster_are_in_one_part_and_training_stays_the_same(source):
    clusters = np.random.default_rng(0).integers(0, 12, len(source().queries))
    data = clustered(source(), clusters)
    plain = divide(data)
    splits, again, other = (divide(data, seed=seed, cluster="hand") for seed in (0, 0, 1))
    for name in ("train", "validation", *(() if source is zero_shot else ("gallery",))):
        assert getattr(splits, name).ids == getattr(plain, name).ids
    assert sorted(ids(splits)) == sorted(ids(plain))
    drawn = [hands(getattr(splits, name)) for name in QUERIES]
    assert all(drawn)
    assert sum(map(len, drawn)) == len(set.union(*drawn))
    assert again.test.ids == splits.test.ids
    assert other.test.ids != splits.test.ids


def test_a_drawn_gallery_has_clusters_of_its_own_and_every_class():
    """Twenty people draw each of ten characters."""
    data = clustered(zero_shot(evaluation=[20] * 10), np.tile(np.arange(20), 10))
    splits = divide(data, gallery=0.2, tuning=30, calibration=0.5, cluster="hand")
    assert np.unique(splits.gallery.labels, return_counts=True)[1].tolist() == [4] * 10
    queries = [getattr(splits, name) for name in QUERIES]
    assert not hands(splits.gallery) & set.union(*map(hands, queries))
    # Of 160 queries by 16 people: 30 by 3 of them, and half of the people.
    assert [len(images) for images in queries] == [30, 80, 50]


def test_an_unknown_cluster_is_refused_with_the_known_attributes():
    with pytest.raises(InvalidConfig, match="they have hand"):
        divide(clustered(closed(), np.arange(60)), cluster="camera")
    with pytest.raises(InvalidConfig, match="they have hand"):
        cluster_warning(calibrated([1, 2]), "camera")


@pytest.mark.parametrize(
    ("parts", "n_clusters"),  # of 40, with 5 images each
    [
        *[({"a": 0.25, "b": 0.5}, [10, 20, 10]), ({"a": 0.001}, [1, 39])],
        *[({"a": 100, "b": 1}, [20, 1, 19]), ({"a": 101, "b": 4}, [21, 1, 18])],
    ],
)
def test_shares_are_of_clusters_and_numbers_of_images_are_rounded_up(parts, n_clusters):
    rows = draw_by_cluster(np.random.default_rng(0), np.repeat(np.arange(40), 5), parts)
    assert [len(each) for each in rows] == [5 * n for n in n_clusters]
    assert (np.diff(rows[-1]) < 0).sum() > len(rows[-1]) / 4  # in random order


def test_the_gallery_has_every_label_and_no_cluster_of_a_query():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        labels, clusters = rng.integers(0, 30, 400), rng.integers(0, 40, 400)
        for size in (0.3, 120):
            gallery, queries = draw_gallery(rng, SameLabel(labels), clusters, size)
            assert sorted([*gallery, *queries]) == list(range(400))
            assert not set(clusters[gallery]) & set(clusters[queries])
            assert set(labels[gallery]) == set(range(30))
            assert 12 <= len(set(clusters[gallery])) <= 18  # requested: 12 of 40 clusters
    clusters = np.repeat(np.arange(20), 5)
    assert draw_gallery(rng, SameLabel(clusters // 2), clusters, 0.4) is not None  # 10 of 20
    assert draw_gallery(rng, SameLabel(clusters), clusters, 0.5) is None


# Queries of new labels


@pytest.mark.parametrize(
    ("source", "options", "n_labels"),
    [
        # 20 labels; those of `zero_shot` with two images or more are 10 of 13.
        *[(closed, {}, [6, 6, 8]), (published, {}, [6, 6, 8]), (zero_shot, {}, [3, 3, 4])],
        (closed, {"tuning": 13, "calibration": 0.5}, [5, 10, 5]),  # 13 queries: 4.3 labels
        (closed, {"tuning": 1, "calibration": 54}, [1, 18, 1]),
    ],
)
def test_queries_of_new_labels_share_no_label_and_all_else_stays(source, options, n_labels):
    plain = divide(source(), **options)
    splits, again = (divide(source(), queries="new-labels", **options) for _ in "ab")
    for name in ("train", "validation", "gallery"):
        assert getattr(splits, name).ids == getattr(plain, name).ids
    labels = [set(getattr(splits, name).labels) for name in QUERIES]
    assert list(map(len, labels)) == n_labels
    assert len(set.union(*labels)) == sum(n_labels)
    assert sorted(ids(splits)) == sorted(ids(plain))
    assert ids(again) == ids(splits) != ids(divide(source(), seed=9, queries="new-labels"))


def test_every_label_is_as_likely_in_each_split():
    """The number of a label's queries plays no part."""
    source = Source(part(TRAIN, "train"), part([1, 3, 9, 27, 81], "query"), "train")
    times = Counter()
    for seed in range(300):
        splits = divide(source, seed=seed, queries="new-labels", tuning=0.2, calibration=0.4)
        times.update(set(splits.calibration.labels.tolist()))
    assert all(90 <= times[label] <= 150 for label in range(5))  # 120 expected, sd 8.5


def test_clusters_within_labels_are_kept_whole_and_clusters_across_labels_are_refused():
    data = clustered(closed(), np.arange(60) // 2)  # two queries each, 30 clusters
    with pytest.raises(InvalidConfig, match="several labels"):
        divide(data, queries="new-labels", cluster="hand")
    nested = clustered(closed(), np.arange(60) // 3 * 10 + np.arange(60) % 3 // 2)
    splits = divide(nested, queries="new-labels", cluster="hand")
    for values in (lambda images: set(images.labels), hands):
        parts = [values(getattr(splits, name)) for name in QUERIES]
        assert sum(map(len, parts)) == len(set.union(*parts))


def test_queries_that_cannot_be_divided_by_label_are_refused():
    for queries, error, word in (
        (random_places(60, "query"), InvalidConfig, "places"),
        (part([30, 30], "query"), InvalidData, "at least 3 labels"),
    ):
        source = Source(part(TRAIN, "train"), queries, queries)
        divide(source)
        with pytest.raises(error, match=word):
            divide(source, queries="new-labels")


# Warnings about clusters


def part_of_hands(hands, cluster="hand"):
    n = len(hands)
    names, labels = [str(row) for row in range(n)], np.zeros(n, int)
    attributes = {"hand": np.array(hands)}
    return ImageSet(np.zeros((n, 1, 1), np.uint8), labels, names, attributes, cluster=cluster)


def calibrated(hands, cluster="hand"):
    """Splits with calibration queries by these hands; everything else is by others."""
    other = part_of_hands([98, 99], cluster)
    return Splits(*[other] * 4, part_of_hands(hands, cluster), other)


def test_calibration_queries_in_clusters_cause_a_warning():
    splits = calibrated(np.arange(2400) % 24)
    warning = cluster_warning(splits, None)
    for phrase in ("2,400 calibration queries", "24 clusters", "--cluster hand"):
        assert phrase in warning
    assert cluster_warning(splits, "hand") is None
    assert cluster_warning(calibrated(np.arange(50)), None) is None
    assert cluster_warning(calibrated([1, 1, 2], cluster=None), None) is None


@pytest.mark.parametrize("name", ["train", "validation", "gallery"])
def test_clusters_in_gallery_or_training_cause_a_warning(name):
    splits = calibrated([1, 1, 2, 2, 3, 3])
    warning = cluster_warning(replace(splits, **{name: part_of_hands([3, 4, 1])}), "hand")
    assert "2 of the 3 clusters" in warning
    assert cluster_warning(replace(splits, test=part_of_hands([3, 4, 1])), "hand") is None
    without = ImageSet(np.zeros((1, 1, 1), np.uint8), np.zeros(1, int), ["x"])
    assert cluster_warning(replace(splits, **{name: without}), "hand") is None
