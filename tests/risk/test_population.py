"""Populations: units of queries, subsets and what does not fit together."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.metrics.labels import UNMATCHED
from rcir.risk.population import KINDS, Population

N = 60
rng = np.random.default_rng(0)
POPULATION = Population(
    N,
    digests=np.array([rng.bytes(16).hex() for _ in range(N)], "S32"),
    labels=rng.integers(5, size=N),
    groups=rng.choice(["a", "b"], N),
    clusters=rng.integers(9, size=N) * 7 - 3,
    cluster_word="video",
)


def test_means_are_of_the_queries_of_each_cluster_or_label():
    values = rng.uniform(size=(N, 3))
    for population, names in (
        (POPULATION, POPULATION.clusters),
        (POPULATION.by_label(), POPULATION.labels),
        (POPULATION.independent(), np.arange(N)),
    ):
        means = [values[names == name].mean(axis=0) for name in np.unique(names)]
        assert population.n_units == len(means)
        np.testing.assert_allclose(population.unit_means(values), means)
        assert len(set(zip(population.units.tolist(), names.tolist(), strict=True))) == len(means)
    words = [one.unit_word for one in (POPULATION, POPULATION.by_label(), POPULATION.independent())]
    assert words == ["clusters", "labels", "queries"]


def test_clusters_that_hold_several_groups_are_counted():
    groups = defaultdict(set)
    for cluster, group in zip(POPULATION.clusters, POPULATION.groups, strict=True):
        groups[cluster].add(group)
    assert POPULATION.n_mixed_clusters == sum(len(names) > 1 for names in groups.values()) > 0
    assert POPULATION.independent().n_mixed_clusters == 0


def test_parts_join_to_the_whole():
    whole = POPULATION[:20].joined(POPULATION[np.arange(20, 45)], POPULATION[45:])
    for name in KINDS:
        np.testing.assert_array_equal(getattr(whole, name), getattr(POPULATION, name))
    assert (len(whole), whole.cluster_word) == (N, "video")
    with pytest.raises(InvalidData, match="digests"):
        POPULATION.joined(Population(3))


@pytest.mark.parametrize(
    "digests",
    [
        POPULATION.digests,
        POPULATION.digests.astype("S7"),
        np.char.add(b"the same", POPULATION.digests),
    ],
    ids=["long", "short", "same start"],
)
def test_the_order_of_the_queries_draws_no_others_of_each_unit(digests):
    population, order = replace(POPULATION, digests=digests), rng.permutation(N)
    drawn = population[order][population[order].one_of_each_unit()]
    expected = population[population.one_of_each_unit()]
    assert sorted(drawn.digests) == sorted(expected.digests)
    assert len(set(drawn.clusters)) == len(drawn) == POPULATION.n_units
    assert len(population[:0].one_of_each_unit()) == 0
    anonymous = Population(N, clusters=POPULATION.clusters, cluster_word="video")
    assert len(set(POPULATION.clusters[anonymous.one_of_each_unit()])) == POPULATION.n_units


def test_units_are_shuffled_whatever_the_rows_and_the_sizes():
    rows = rng.permutation(N)
    for population in (POPULATION, POPULATION.independent()):
        drawn = [
            (part.digests if part.clusters is None else np.unique(part.clusters))[
                part.shuffled_units()
            ].tolist()
            for part in (population, population[rows])
        ]
        assert drawn[0] == drawn[1] != sorted(drawn[0])
        assert population.unit_sizes.sum() == N
    # The mean place of the largest of 40 clusters is the middle one.
    places = []
    for n in range(400):
        sizes = np.random.default_rng(n).geometric(0.2, 40)
        clusters = np.repeat(np.arange(40), sizes)
        digests = np.array([f"{n}, {row}" for row in range(len(clusters))], "S32")
        one = Population(len(clusters), digests, clusters=clusters, cluster_word="video")
        places.append(one.shuffled_units().tolist().index(int(np.argmax(sizes))))
    assert abs(np.mean(places) - 19.5) < 3 * 11.5 / 20


def test_a_query_without_a_known_label_has_no_unit_by_label():
    population = Population(3, labels=np.array([4, UNMATCHED, 2]))
    assert (population.known_labels.tolist(), population.single_labels) == ([2, 4], None)
    assert population[::2].single_labels.tolist() == [4, 2]
    for one in (population, Population(3)):
        with pytest.raises(InvalidConfig, match="label"):
            one.by_label()


def test_labels_are_64_bit_integers_with_a_sign():
    assert Population(3, labels=np.arange(3, dtype=np.uint64)).labels.dtype == np.int64
    with pytest.raises(InvalidData, match="labels"):
        Population(1, labels=np.array([1 << 63], np.uint64))


def test_arrays_cannot_be_written_to():
    for name in KINDS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(POPULATION, name)[0] = getattr(POPULATION, name)[1]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", [[True] * N, "many", 3, np.zeros(N), np.zeros(N - 1, int)])
def test_values_that_are_not_one_for_each_query_are_refused_by_name(name, value):
    with pytest.raises(InvalidData, match=name):
        Population(N, **{name: value})


@pytest.mark.parametrize("options", [{"clusters": np.arange(3)}, {"cluster_word": "video"}])
def test_clusters_need_a_word_and_a_word_needs_clusters(options):
    with pytest.raises(InvalidData, match="clusters"):
        Population(3, **options)
