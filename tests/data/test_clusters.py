from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rcir.data import ImageSet, Splits, cluster_warning
from rcir.data.clusters import draw_by_cluster, draw_gallery
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.errors import InvalidConfig, InvalidData


def drawn(clusters, parts, seed=0):
    return draw_by_cluster(np.random.default_rng(seed), np.asarray(clusters), parts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [{"a": 0.3, "b": 0.3}, {"a": 5, "b": 0.5}, {"a": 1}], ids=str)
def test_every_row_is_in_one_part_and_every_cluster_too(seed, parts):
    clusters = np.random.default_rng(seed).integers(0, 9, 50)
    rows = drawn(clusters, parts, seed)
    assert len(rows) == len(parts) + 1
    assert sorted(np.concatenate(rows).tolist()) == list(range(50))
    found = Counter(cluster for part in rows for cluster in set(clusters[part].tolist()))
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    ("parts", "clusters"),  # of 40, with 5 images each
    [
        ({"a": 0.25, "b": 0.5}, [10, 20, 10]),
        ({"a": 0.001}, [1, 39]),
        ({"a": 100, "b": 1}, [20, 1, 19]),
        ({"a": 101, "b": 4}, [21, 1, 18]),
    ],
    ids=str,
)
def test_shares_are_of_clusters_and_numbers_of_images_are_rounded_up_to_clusters(parts, clusters):
    assert [len(part) for part in drawn(np.repeat(np.arange(40), 5), parts)] == [
        5 * n for n in clusters
    ]


def test_rows_come_in_random_order():
    first, _ = drawn(np.repeat(np.arange(20), 10), {"a": 0.5})
    assert (np.diff(first) < 0).sum() > 20


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"a": 0.5, "b": 0.5}, "a 0.5 . b 0.5 of 30 queries in 6 clusters: that is 6 clusters"),
        ({"a": 21, "b": 5}, "a 21 . b 5 of 30 queries in 6 clusters: that is 6 clusters"),
    ],
)
def test_parts_that_leave_no_cluster_are_refused(parts, said):
    with pytest.raises(InvalidData, match=f"{said}, and some must remain to test on: ask for less"):
        drawn(np.repeat(np.arange(6), 5), parts)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("asked", [0.3, 120])
def test_the_gallery_holds_every_label_and_no_cluster_of_a_query(seed, asked):
    rng = np.random.default_rng(seed)
    labels, clusters = rng.integers(0, 30, 400), rng.integers(0, 40, 400)
    held, others = draw_gallery(rng, SameLabel(labels), clusters, asked)
    assert sorted([*held, *others]) == list(range(400))
    assert not set(clusters[held]) & set(clusters[others])
    assert set(labels[held]) == set(range(30))
    assert 12 <= len(set(clusters[held])) <= 18  # asked for: 12 of 40 clusters


def test_a_label_in_one_cluster_is_searched_with_all_of_that_cluster():
    clusters = np.tile(np.arange(10), 10)
    labels = np.where(clusters == 4, 7, np.repeat(np.arange(5), 20))
    for seed in range(20):
        held, _ = draw_gallery(np.random.default_rng(seed), SameLabel(labels), clusters, 0.2)
        assert (clusters[held] == 4).sum() == 10
        assert len(set(clusters[held])) == 2


def test_labels_that_need_too_many_clusters_give_no_gallery():
    rng, clusters = np.random.default_rng(0), np.repeat(np.arange(20), 5)
    assert draw_gallery(rng, SameLabel(clusters // 2), clusters, 0.4) is not None  # 10 of 20
    assert draw_gallery(rng, SameLabel(clusters), clusters, 0.5) is None


def test_without_labels_clusters_are_drawn_at_random():
    clusters = np.repeat(np.arange(20), 5)
    relevance = SharedLabel.of_lists([[row % 3] for row in range(100)], 3)
    galleries = [
        set(clusters[draw_gallery(np.random.default_rng(seed), relevance, clusters, 0.25)[0]])
        for seed in range(40)
    ]
    assert {len(each) for each in galleries} == {5}
    assert set.union(*galleries) == set(range(20))


def images(hands, cluster="hand"):
    n = len(hands)
    names = [str(row) for row in range(n)]
    return ImageSet(
        np.zeros((n, 1, 1), np.uint8), np.zeros(n, int), names, {"hand": hands}, cluster=cluster
    )


def splits(hands, others=(98, 99), cluster="hand"):
    """Calibration queries by some hands; everything else by others."""
    other = images(np.array(others), cluster)
    return Splits(*[other] * 4, images(np.array(hands), cluster), other)


def test_queries_in_clusters_are_warned_of_unless_they_are_named():
    found = cluster_warning(splits(np.arange(2400) % 24), None)
    assert found is not None
    for said in (
        "2,400 calibration queries",
        "24 clusters (hand)",
        "of these 24",
        "--cluster hand",
    ):
        assert said in found
    assert cluster_warning(splits(np.arange(2400) % 24), "hand") is None


@pytest.mark.parametrize("given", [splits(np.arange(50)), splits([1, 1, 2], cluster=None)])
def test_queries_alone_in_their_clusters_or_in_none_known_are_not(given):
    assert cluster_warning(given, None) is None


@pytest.mark.parametrize("part", ["train", "validation", "gallery"])
def test_clusters_that_are_searched_or_trained_on_are_warned_of(part):
    given = splits([1, 1, 2, 2, 3, 3])
    seen = cluster_warning(replace(given, **{part: images(np.array([3, 4, 1]))}), "hand")
    assert seen is not None
    assert "2 of the 3 clusters (hand) of the calibration queries are also" in seen
    assert cluster_warning(replace(given, test=images(np.array([3, 4, 1]))), "hand") is None
    nothing = ImageSet(np.zeros((1, 1, 1), np.uint8), np.zeros(1, int), ["x"])
    assert cluster_warning(replace(given, **{part: nothing}), "hand") is None


def test_a_cluster_that_is_no_attribute_is_refused():
    with pytest.raises(InvalidConfig, match=r"cluster is 'camera', .*; they have hand"):
        cluster_warning(splits([1, 2]), "camera")
