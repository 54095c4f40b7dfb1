import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rcir.data.division import Source, divide
from rcir.data.records import ImageSet, Splits
from rcir.data.relevance import SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidConfig, InvalidData

QUERIES = ("tuning", "calibration", "test")


def part(counts, name, first=0):
    """Images sorted by class, `counts` of each; a pixel names the image."""
    labels = np.repeat(np.arange(first, first + len(counts)), counts)
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None]
    return ImageSet(pixels, labels, [f"{name}-{n}" for n in range(len(labels))])


def places(n, name):
    positions = np.random.default_rng(n).uniform(0, 100, (n, 2))
    ids = [f"{name}-{i}" for i in range(n)]
    return ImageSet(np.zeros((n, 1, 1), np.uint8), None, ids, {}, WithinRadius(positions, 25.0))


TRAIN = [6] * 20
EVALUATION = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 20, 1]


def zero_shot():
    return Source(part(TRAIN, "train"), part(EVALUATION, "query", first=20), "queries")


def closed():
    return Source(part(TRAIN, "train"), part([3] * 20, "query"), "train")


def published():
    return Source(part(TRAIN, "train"), part([3] * 20, "query"), part([2] * 20, "gallery"))


SOURCES = [zero_shot, closed, published]


def ids(splits):
    return [name for images in vars(splits).values() for name in images.ids]


def sizes(splits):
    return {name: len(images) for name, images in vars(splits).items()}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", range(3))
def test_every_image_is_in_one_part(source, seed):
    given = source()
    splits = divide(given, seed=seed)
    expected = [*given.train.ids, *given.queries.ids]
    if isinstance(given.gallery, ImageSet):
        expected += given.gallery.ids
    assert isinstance(splits, Splits)
    assert Counter(ids(splits)) == Counter(expected)
    for images in vars(splits).values():
        assert len(images) > 0
    for name in QUERIES:
        assert all(identifier.startswith("query") for identifier in getattr(splits, name).ids)
    assert all(identifier.startswith("train") for identifier in splits.train.ids)
    assert all(identifier.startswith("train") for identifier in splits.validation.ids)


@pytest.mark.parametrize("source", SOURCES)
def test_images_keep_their_labels(source):
    given = source()
    label = {
        name: int(number)
        for images in (given.train, given.queries, given.gallery)
        if isinstance(images, ImageSet)
        for name, number in zip(images.ids, images.labels, strict=True)
    }
    for images in vars(divide(given, seed=2)).values():
        assert [label[name] for name in images.ids] == images.labels.tolist()
        if not images.ids[0].startswith("gallery"):
            assert [
                int(name.split("-")[1]) for name in images.ids
            ] == images.images.ravel().tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_the_seed_decides_who_is_where(source):
    first, again, other = (divide(source(), seed=seed) for seed in (5, 5, 6))
    assert {name: images.ids for name, images in vars(first).items()} == {
        name: images.ids for name, images in vars(again).items()
    }
    for name in ("validation", *QUERIES):
        assert set(getattr(first, name).ids) != set(getattr(other, name).ids)


@pytest.mark.parametrize("source", SOURCES)
def test_queries_come_in_random_order(source):
    splits = divide(source(), tuning=11, calibration=11)
    for name in QUERIES:
        labels = getattr(splits, name).labels
        # Sorted by class, they would never fall.
        assert (np.diff(labels) < 0).sum() > 2


@pytest.mark.parametrize("validation", [0.1, 0.5, 3])
def test_no_class_that_trains_validates_in_a_zero_shot_set(validation):
    splits = divide(zero_shot(), validation=validation)
    trains, validates = (set(images.labels) for images in (splits.train, splits.validation))
    assert not trains & validates
    assert len(validates) == {0.1: 3, 0.5: 10, 3: 3}[validation]
    assert (len(splits.validation), len(splits.train)) == (
        6 * len(validates),
        6 * (20 - len(validates)),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gallery", [0.5, 0.25, 0.07, 0.9])
def test_the_share_of_every_class_is_searched_rounded_up(gallery, seed):
    splits = divide(zero_shot(), seed=seed, gallery=gallery, tuning=1, calibration=1)
    searched = Counter(splits.gallery.labels.tolist())
    assert searched == {
        label: math.ceil(round(gallery * count, 9)) for label, count in enumerate(EVALUATION, 20)
    }


@pytest.mark.parametrize("n_odd", [1, 3, 5, 7])
def test_half_of_an_even_class_is_half_of_it_whatever_the_number_of_all_images(n_odd):
    evaluation = [2, 4, 100, *[1] * n_odd]
    source = Source(part(TRAIN, "train"), part(evaluation, "query", first=20), "queries")
    searched = Counter(divide(source).gallery.labels.tolist())
    assert [searched[label] for label in (20, 21, 22)] == [1, 2, 50]


def test_a_share_is_exact_where_floating_point_is_not():
    source = Source(part(TRAIN, "train"), part([100, 100], "query", first=20), "queries")
    assert 0.07 * 100 > 7
    assert Counter(divide(source, gallery=0.07).gallery.labels.tolist()) == {20: 7, 21: 7}
    assert Counter(divide(source, gallery=14).gallery.labels.tolist()) == {20: 7, 21: 7}


def test_an_image_alone_in_its_class_is_searched_not_asked():
    alone = {20, 30, 32}
    for seed in range(5):
        splits = divide(zero_shot(), seed=seed, gallery=0.1)
        assert alone <= set(splits.gallery.labels)
        for name in QUERIES:
            assert not alone & set(getattr(splits, name).labels)
            assert set(getattr(splits, name).labels) <= set(splits.gallery.labels)


@pytest.mark.parametrize("number", [13, 14, 20, 39, 60, 74])
def test_a_number_of_the_gallery_is_met_and_spread_over_the_classes(number):
    counts = np.array(EVALUATION)
    gallery = divide(zero_shot(), gallery=number, tuning=1, calibration=1).gallery
    searched = Counter(gallery.labels.tolist())
    held = np.array([searched[label] for label in range(20, 33)])
    assert held.sum() == number
    assert (held >= 1).all()
    # No image is searched out of turn: none could go to a class that has a smaller share by one.
    assert ((held - 1) / counts).max() <= (held / counts).min() + 1e-9


def test_a_number_of_the_gallery_that_leaves_a_class_out_is_refused():
    with pytest.raises(InvalidData, match=r"gallery 12 is less than the 13 classes"):
        divide(zero_shot(), gallery=12)


def test_which_images_of_a_class_are_searched_is_drawn():
    drawn = []
    for seed in (0, 1):
        gallery = divide(zero_shot(), seed=seed).gallery
        drawn.append(sorted(gallery.images[gallery.labels == 31].ravel().tolist()))
        assert len(drawn[-1]) == 10
        assert drawn[-1] != list(range(56, 66))  # the first ten of the class of twenty
    assert drawn[0] != drawn[1]


def test_a_published_gallery_is_kept():
    source = published()
    splits = divide(source, gallery=3)  # which is not drawn
    assert splits.gallery is source.gallery
    assert sizes(splits) == {
        **{"train": 108, "validation": 12, "gallery": 40},
        **{"tuning": 18, "calibration": 18, "test": 24},
    }


def test_the_gallery_of_a_closed_set_is_drawn_from_the_training_half():
    splits = divide(closed())
    assert all(name.startswith("train") for name in splits.gallery.ids)
    assert sizes(splits) == {
        **{"train": 48, "validation": 12, "gallery": 60},
        **{"tuning": 18, "calibration": 18, "test": 24},
    }


@pytest.mark.parametrize("source", [closed, published])
def test_parts_are_given_as_shares_or_as_numbers(source):
    numbers = divide(source(), validation=7, gallery=11, tuning=1, calibration=58)
    assert (len(numbers.validation), len(numbers.tuning)) == (7, 1)
    assert (len(numbers.calibration), len(numbers.test)) == (58, 1)
    if source is closed:
        assert (len(numbers.gallery), len(numbers.train)) == (11, 102)
    shares = divide(source(), validation=0.05, gallery=0.2, tuning=0.25, calibration=0.5)
    assert (len(shares.validation), len(shares.tuning)) == (6, 15)
    assert (len(shares.calibration), len(shares.test)) == (30, 15)


def test_images_of_places_keep_their_places():
    source = Source(places(50, "train"), places(40, "query"), "queries")
    splits = divide(source, validation=0.2, gallery=0.5, tuning=5, calibration=6)
    assert sizes(splits) | {"train": 0, "validation": 0} == {
        **{"train": 0, "validation": 0, "gallery": 20},
        **{"tuning": 5, "calibration": 6, "test": 9},
    }
    assert len(set(ids(splits))) == 90
    assert 5 <= len(splits.validation) <= 15
    for images, half in ((splits.train, source.train), (splits.test, source.queries)):
        rows = [half.ids.index(name) for name in images.ids]
        np.testing.assert_array_equal(images.relevance.places, half.relevance.places[rows])


def set_of_places(positions, name, radius=25.0):
    names = [f"{name}-{i}" for i in range(len(positions))]
    relevance = WithinRadius(np.asarray(positions, float), radius)
    return ImageSet(np.zeros((len(names), 1, 1), np.uint8), None, names, {}, relevance)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("validation", [0.1, 0.3, 400])
def test_validation_places_match_each_other_and_lie_apart_from_training(seed, validation):
    """A city of 8 x 6 km in which every place was photographed about four times."""
    rng = np.random.default_rng(seed)
    corners = np.repeat(rng.uniform(0, [8000, 6000], (1000, 2)), 4, axis=0)
    city = 5e5 + corners + rng.normal(0, 4, corners.shape)
    source = Source(set_of_places(city, "train"), places(60, "query"), places(30, "gallery"))
    splits = divide(source, seed=seed, validation=validation)
    wanted = validation if validation > 1 else validation * 4000
    assert 0.5 * wanted <= len(splits.validation) <= 1.5 * wanted
    assert len(splits.validation) + len(splits.train) == 4000
    where, trains = splits.validation.relevance, splits.train.relevance
    assert (where.totals(where) > 1).mean() > 0.95
    # Of images drawn one by one nearly all would have a neighbour on the other side.
    assert (where.totals(trains) > 0).mean() < 0.3


def test_cities_that_share_coordinates_are_divided_apart():
    """The third coordinate is the city's."""
    rng = np.random.default_rng(0)
    city = np.column_stack([rng.uniform(0, 900, (400, 2)), 1e6 * np.repeat(np.arange(8), 50)])
    other = set_of_places(rng.uniform(0, 90, (40, 3)), "query")
    splits = divide(Source(set_of_places(city, "train"), other, other), validation=0.25)
    kinds = [set(part.relevance.places[:, 2]) for part in (splits.train, splits.validation)]
    assert (len(kinds[0]), len(kinds[1]), kinds[0] & kinds[1]) == (6, 2, set())


def test_places_that_cannot_be_told_apart_are_refused():
    other = places(40, "query")
    same = set_of_places(np.zeros((30, 2)), "train")
    with pytest.raises(
        InvalidData, match=r"validation 0\.1 of 30 images, about 3, cannot be drawn"
    ):
        divide(Source(same, other, other))
    with pytest.raises(InvalidData, match="validation 30 must leave some of 30 images over"):
        divide(Source(same, other, other), validation=30)


@pytest.mark.parametrize("seed", range(3))
def test_whole_classes_validate_where_the_queries_show_other_classes(seed):
    """People of Market-1501: none is in both halves, the gallery is published."""
    queries, gallery = part([3] * 20, "query", first=20), part([2] * 25, "gallery", first=18)
    splits = divide(Source(part(TRAIN, "train"), queries, gallery), seed=seed, validation=0.2)
    trains, validates = (set(images.labels) for images in (splits.train, splits.validation))
    assert (len(trains), len(validates), trains & validates) == (16, 4, set())
    assert len(splits.validation) == 24


def test_shared_labels_have_no_classes_and_validate_as_images():
    def half(n, name):
        relevance = SharedLabel.of_lists([[i % 5, 5] for i in range(n)], 6)
        names = [f"{name}-{i}" for i in range(n)]
        return ImageSet(np.zeros((n, 1, 1), np.uint8), None, names, {}, relevance)

    splits = divide(Source(half(50, "train"), half(40, "query"), half(20, "gallery")))
    assert (len(splits.validation), len(splits.train)) == (5, 45)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [6, 9, 20])
def test_a_share_of_the_classes_is_three_at_least(n, seed):
    source = Source(part([3] * n, "train"), part([3] * 4, "query", first=n), "queries")
    splits, again, other = (divide(source, seed=each) for each in (seed, seed, seed + 1))
    trains, validates = (set(images.labels) for images in (splits.train, splits.validation))
    assert (len(trains), len(validates), trains & validates) == (n - 3, 3, set())
    assert again.validation.ids == splits.validation.ids
    assert n == 6 or other.validation.ids != splits.validation.ids


@pytest.mark.parametrize("seed", range(5))
def test_of_many_people_with_one_picture_three_that_match_validate(seed):
    """Half of the pictures of LFW are of people with one picture."""
    source = Source(part([1] * 40 + [2] * 4, "train"), part([2] * 9, "query", first=44), "queries")
    splits = divide(source, seed=seed)
    counts = np.unique(splits.validation.labels, return_counts=True)[1]
    assert (len(counts), (counts == 2).sum() >= 3) == (4, True)  # a tenth of 44
    assert not set(splits.train.labels) & set(splits.validation.labels)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sizes_of", "share", "validates"),
    [
        ([5] * 2, 0.1, [2, 2]),
        ([30, 20, 10], 0.1, [3, 2, 2]),
        ([30, 20, 10, 4, 3], 0.5, [15, 10, 5, 2]),
        ([4, 4, 4], 0.9, [2, 2, 2]),
    ],
)
def test_of_few_classes_images_of_each_validate(sizes_of, share, validates, seed):
    n = len(sizes_of)
    source = Source(part(sizes_of, "train"), part([3] * 3, "query", first=n), "queries")
    splits, again = (divide(source, seed=seed, validation=share) for _ in range(2))
    found = np.bincount(splits.validation.labels, minlength=n)[: len(validates)]
    assert found.tolist() == validates
    assert len(splits.validation) == sum(validates)
    assert set(splits.train.labels) == set(range(n))
    assert sorted(splits.train.ids + splits.validation.ids) == sorted(source.train.ids)
    assert again.validation.ids == splits.validation.ids


def test_few_small_classes_validate_whole():
    """Of two pictures of a class none can be spared."""
    source = Source(part([2] * 5, "train"), part([2] * 5, "query", first=5), "queries")
    splits = divide(source)
    assert np.unique(splits.validation.labels, return_counts=True)[1].tolist() == [2, 2]
    assert len(splits.train) == 6


def test_a_number_of_classes_is_met_as_it_is_given():
    source = Source(part([9] * 5, "train"), part([3] * 3, "query", first=5), "queries")
    assert np.bincount(divide(source, validation=1).validation.labels).max() == 9
    assert len(divide(source, validation=1).validation) == 9


def test_a_share_of_few_is_at_least_one():
    """Three classes to train on, a tenth of which would be none."""
    source = Source(part([4] * 3, "train"), part([3] * 3, "query", first=3), "queries")
    splits = divide(source)
    assert sizes(splits) == {
        **{"train": 6, "validation": 6, "gallery": 6},
        **{"tuning": 1, "calibration": 1, "test": 1},
    }
    for name in ("validation", "tuning", "calibration", "gallery"):
        assert len(getattr(divide(closed(), **{name: 0.001}), name)) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"validation": 0}, "validation is 0, of 20 classes: give"),
        ({"gallery": 0}, "gallery is 0, of 77 images: give"),
        ({"tuning": -2}, r"tuning is -2, of 3\d queries: give"),
        ({"validation": True}, "validation is True, of 20 classes: give"),
    ],
)
def test_what_a_part_is_taken_of_is_named(asked, said):
    with pytest.raises(InvalidData, match=said):
        divide(zero_shot(), **asked)


def test_too_few_classes_for_any_size_say_so():
    source = Source(part([4], "train"), part([4] * 3, "query", first=3), "queries")
    with pytest.raises(InvalidData, match=r"some of 1 classes over: have at least 2 classes"):
        divide(source)


@pytest.mark.parametrize("asked", [{}, {"validation": 900}, {"gallery": 0.1}, {"tuning": 900}])
def test_classes_of_one_image_leave_no_query(asked):
    source = Source(part([4] * 9, "train"), part([1] * 7, "query", first=9), "queries")
    with pytest.raises(InvalidData, match=r"no query remains: each of the 7 classes .* one image"):
        divide(source, **asked)


def test_a_share_that_is_all_of_every_class_leaves_no_query():
    source = Source(part([4] * 9, "train"), part([3] * 7, "query", first=9), "queries")
    with pytest.raises(InvalidData, match=r"gallery 0\.9 of each of 7 classes, .* all of their 21"):
        divide(source, gallery=0.9)


@pytest.mark.parametrize("source", [zero_shot, closed, published])
@pytest.mark.parametrize("name", ["validation", "tuning", "calibration", "gallery"])
@pytest.mark.parametrize("share", [0, -0.2, -3, 1.5, math.nan, math.inf, -math.inf])
def test_a_part_of_no_image_or_a_broken_number_is_refused(source, name, share):
    if source is published and name == "gallery":
        return
    with pytest.raises(InvalidData, match=rf"^{name} is {share:g}, of \d+ [a-z]+: give a share"):
        divide(source(), **{name: share})


@pytest.mark.parametrize(
    ("source", "asked", "said"),
    [
        (closed, {"validation": 60, "gallery": 60}, "validation 60 .* gallery 60 .* of 120 images"),
        (closed, {"validation": 0.5}, "validation 0.5 .* gallery 0.5 must leave some of 120"),
        (published, {"validation": 120}, "validation 120 must leave some of 120"),
        (
            published,
            {"tuning": 30, "calibration": 30},
            "tuning 30 .* calibration 30 .* of 60 queries",
        ),
        (published, {"tuning": 0.5, "calibration": 0.5}, "tuning 0.5 .* of 60 queries"),
        (zero_shot, {"validation": 20}, "validation 20 must leave some of 20 classes"),
        (zero_shot, {"gallery": 77}, "gallery 77 must leave some of 77 images"),
        (zero_shot, {"gallery": 900}, "gallery 900 must leave some of 77 images"),
    ],
)
def test_parts_that_leave_nothing_over_are_refused(source, asked, said):
    with pytest.raises(InvalidData, match=f"{said}.*: ask for less"):
        divide(source(), **asked)


def clustered(source, clusters):
    """The same data set, its queries with the attribute "hand"."""
    return replace(source, queries=replace(source.queries, attributes={"hand": clusters}))


def hands(images):
    return set(images.attributes["hand"].tolist())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", range(4))
def test_queries_of_one_cluster_are_in_one_part_and_training_stays_the_same(source, seed):
    given = source()
    clusters = np.random.default_rng(seed).integers(0, 12, len(given.queries))
    given = clustered(given, clusters)
    plain = divide(given, seed=seed)
    splits = divide(given, seed=seed, cluster="hand")
    for name in ("train", "validation"):
        assert getattr(splits, name).ids == getattr(plain, name).ids
    assert sorted(ids(splits)) == sorted(ids(plain))
    drawn = [hands(getattr(splits, name)) for name in QUERIES]
    assert all(drawn)
    assert sum(map(len, drawn)) == len(set.union(*drawn))
    if source is not zero_shot:
        assert splits.gallery.ids == plain.gallery.ids
    again, other = (divide(given, seed=each, cluster="hand") for each in (seed, seed + 1))
    assert again.test.ids == splits.test.ids
    assert other.test.ids != splits.test.ids


def test_a_drawn_gallery_has_clusters_of_its_own_and_every_class():
    """Twenty people draw each of ten characters."""
    people = np.tile(np.arange(20), 10)
    source = Source(part(TRAIN, "train"), part([20] * 10, "query", first=20), "queries")
    splits = divide(
        clustered(source, people), gallery=0.2, tuning=30, calibration=0.5, cluster="hand"
    )
    assert np.unique(splits.gallery.labels, return_counts=True)[1].tolist() == [4] * 10
    assert not hands(splits.gallery) & set.union(
        *(hands(getattr(splits, name)) for name in QUERIES)
    )
    # Of 160 queries by 16 people: 30 by 3 of them, and half of the people.
    assert [len(getattr(splits, name)) for name in QUERIES] == [30, 80, 50]


def test_classes_in_one_cluster_each_keep_the_gallery_that_they_have_without():
    source = Source(part(TRAIN, "train"), part([20] * 10, "query", first=20), "queries")
    given = clustered(source, np.repeat(np.arange(5), 40))
    plain, splits = divide(given, seed=3), divide(given, seed=3, cluster="hand")
    assert splits.gallery.ids == plain.gallery.ids
    assert sorted(ids(splits)) == sorted(ids(plain))
    assert [len(hands(getattr(splits, name))) for name in QUERIES] == [2, 2, 1]


def test_a_cluster_that_the_queries_do_not_have_is_refused_with_those_they_have():
    given = clustered(closed(), np.arange(60))
    with pytest.raises(InvalidConfig, match=r"cluster is 'camera', .*attribute; they have hand"):
        divide(given, cluster="camera")


@pytest.mark.parametrize(
    ("clusters", "asked", "said"),
    [
        (
            np.zeros(60),
            {},
            r"tuning 0\.3 \+ calibration 0\.3 of 60 queries in 1 clusters: .* 2 cl",
        ),
        (np.arange(60) % 6, {"tuning": 21, "calibration": 30}, "in 6 clusters: that is 6 cluster"),
        (np.arange(60) % 6, {"calibration": 0}, r"^calibration is 0, of 60 queries: give a share"),
    ],
    ids=["one cluster", "too many", "none"],
)
def test_clusters_that_leave_nothing_over_are_refused(clusters, asked, said):
    with pytest.raises(InvalidData, match=said):
        divide(clustered(closed(), clusters), cluster="hand", **asked)


def test_parts_that_just_fit_leave_one_image_over():
    splits = divide(closed(), validation=59, gallery=60, tuning=30, calibration=29)
    assert (len(splits.train), len(splits.test)) == (1, 1)
