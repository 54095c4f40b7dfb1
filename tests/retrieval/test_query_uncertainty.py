"""The uncertainties of queries that a retriever can use, compared with values by hand."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.data.relevance import WithinRadius
from rcir.errors import InvalidConfig
from rcir.retrieval.query_uncertainty import available_uncertainties, with_uncertainty
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, SearchResults, smallest_uncertainty
from tests.retrieval.retrievers import build, search
from tests.retrieval.whole_numbers import CALIBRATION, FURTHER, GALLERY, TEST, TUNING

KINDS = ("encoder", "cosine", "vote", "gap")


@pytest.fixture
def own():
    return build(uncertainty=None)


def by_hand(part):
    """One minus the cosine to the nearest item, the share of 30 candidates with another label than
    the first, and the distance to the first over that to the first of another label.
    """
    distances = cdist(part.vectors, GALLERY.vectors)
    labels = GALLERY.labels[part.order]
    first = labels[:, :1]
    nearest = np.take_along_axis(distances, part.order[:, :1], axis=1)[:, 0]
    ordered = np.take_along_axis(distances, part.order, axis=1)
    other = np.where(first == labels, np.inf, ordered).min(1)
    cosine = np.take_along_axis(
        cdist(part.vectors, GALLERY.vectors, "cosine"), part.order[:, :1], axis=1
    )[:, 0]
    return {
        "encoder": cosine,
        "cosine": cosine,
        "vote": 1 - (labels[:, :30] == first).mean(1),
        "gap": nearest / other,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_uncertainties_are_those_by_hand(own, kind):
    found = with_uncertainty(own.searcher, own.search(TEST.vectors), kind)
    np.testing.assert_allclose(found.uncertainty, by_hand(TEST)[kind], rtol=1e-2, atol=1e-9)


def test_the_uncertainty_of_its_own_is_what_a_query_came_with(own):
    found = search(own, TEST)
    np.testing.assert_array_equal(found.results.uncertainty, TEST.uncertainty)
    voted = with_uncertainty(own.searcher, found, "vote")
    np.testing.assert_allclose(voted.results.uncertainty, by_hand(TEST)["vote"])
    again = with_uncertainty(own.searcher, voted, "encoder").results
    np.testing.assert_array_equal(again.uncertainty, TEST.uncertainty)


def test_places_vote_and_spread():
    places = np.random.default_rng(1).integers(0, 10, (300, 2)).astype(float)
    own = build(WithinRadius(places, 3.5), uncertainty=None)
    assert available_uncertainties(own.searcher) == ("encoder", "cosine", "gap", "vote", "spread")
    found = own.search(TEST.vectors)
    near = cdist(places, places) <= 3.5
    expected = [1 - near[row[0], row[:30]].mean() for row in TEST.order]
    np.testing.assert_allclose(with_uncertainty(own.searcher, found, "vote").uncertainty, expected)
    expected = np.sqrt(places[TEST.order[:, :10]].var(axis=1).sum(axis=1))
    np.testing.assert_allclose(
        with_uncertainty(own.searcher, found, "spread").uncertainty, expected
    )
    few = rcir.Retriever.from_embeddings(GALLERY.vectors[1:4], labels=WithinRadius(places[:3], 3.5))
    spread = with_uncertainty(few.searcher, few.search(TEST.vectors[:2]), "spread").uncertainty
    np.testing.assert_allclose(spread, np.sqrt(places[:3].var(axis=0).sum()))


def test_the_gap_without_labels_is_to_the_second_candidate():
    vectors = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    queries = np.array([[1, 0], [0.6, 0.8]], np.float32)

    def gap(queries, *arguments, **options):
        one = rcir.Retriever.from_embeddings(*arguments, **options)
        return with_uncertainty(one.searcher, one.search(queries), "gap").uncertainty

    np.testing.assert_allclose(gap(queries, vectors[:2]), [0, np.sqrt(0.4 / 0.8)], atol=1e-5)
    assert gap(queries[:1], vectors).tolist() == [1]  # of two equal distances
    assert gap(queries, vectors[:2], labels=[5, 5]).tolist() == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_use_the_uncertainty_that_calibrated(own, tmp_path, kind):
    own.calibrate(FURTHER.vectors, FURTHER.labels, "minmax", query_uncertainty=kind)
    loaded = rcir.load(own.save(tmp_path / "own"))
    for one in (own, loaded):
        found = [answer.uncertainty for answer in one.retrieve(TEST.vectors, 0.3, 0.1)]
        np.testing.assert_allclose(found, by_hand(TEST)[kind], rtol=1e-2, atol=1e-9)
    loaded.remove(["3"])
    loaded.recalibrate()
    assert own.calibration.uncertainty == loaded.calibration.uncertainty == kind


def test_auto_chooses_the_uncertainty_that_needs_the_smallest_sets(own):
    part = CALIBRATION + FURTHER
    report = own.calibrate(part.vectors, part.labels, "quantile")
    assert report.chosen.sizes.keys() == set(KINDS)
    chosen = own.calibration.uncertainty
    # Sizes that are close count as equal.
    smallest = min(sizes[0.1] for sizes in report.chosen.sizes.values())
    assert report.chosen.sizes[chosen][0.1] <= 1.2 * smallest
    sizes = {
        kind: own.calibrate(part.vectors, part.labels, "quantile", query_uncertainty=kind)
        .rows[1]
        .mean_size
        for kind in ("cosine", chosen)
    }
    assert sizes[chosen] < sizes["cosine"]


@pytest.mark.parametrize("kind", ["variance", 3, None])
def test_an_unknown_uncertainty_is_refused(own, kind):
    with pytest.raises(InvalidConfig, match="unknown"):
        own.calibrate(TUNING.vectors, TUNING.labels, query_uncertainty=kind)


def test_a_gallery_without_labels_does_not_vote(retriever, splits):
    gallery = replace(retriever.searcher.gallery, relevance=None)
    bare = Retriever(replace(retriever.searcher, gallery=gallery))
    found = bare.search(splits.test.images[:5])
    with pytest.raises(InvalidConfig, match="vote"):
        with_uncertainty(bare.searcher, found, "vote")


# The choice


def results(uncertainty, ranks, depth=30):
    relevant = ranks[:, None] == np.arange(1, depth + 1)
    found = SearchResults(uncertainty, depth)
    return LabelledResults(found, relevant, np.ones(len(ranks), np.int64))


def test_the_first_uncertainty_stays_unless_another_is_better():
    rng = np.random.default_rng(0)
    ranks = rng.integers(1, 10, 400)
    noise, oracle = rng.uniform(size=400), ranks / 10
    name, sizes = smallest_uncertainty(
        {"noise": results(noise, ranks), "oracle": results(oracle, ranks)}
    )
    assert name == "oracle"
    assert sizes["oracle"][0.1] < sizes["noise"][0.1]
    same = {"first": results(noise, ranks), "second": results(noise, ranks)}
    assert smallest_uncertainty(same)[0] == "first"
    few = {"a": results(noise[:40], ranks[:40]), "b": results(oracle[:40], ranks[:40])}
    assert smallest_uncertainty(few) == ("a", {})


@pytest.mark.parametrize(
    ("size", "chosen"),
    [(1.9, "telling"), (2.1, "telling"), (2.3, "noise")],
    ids=["smaller", "close", "larger"],
)
def test_among_close_sizes_the_one_that_predicts_misses_better_is_chosen(monkeypatch, size, chosen):
    rng = np.random.default_rng(1)
    ranks, noise = rng.integers(1, 3, 200), rng.uniform(size=200)
    candidates = {"noise": results(noise, ranks), "telling": results(noise + ranks, ranks)}
    sizes = iter([{0.1: 2.0}, {0.1: size}])
    monkeypatch.setattr("rcir.risk.selection.mean_sizes", lambda *_: next(sizes))
    assert smallest_uncertainty(candidates, alphas=(0.1,))[0] == chosen


@pytest.mark.parametrize("informed", [True, False])
def test_auto_takes_the_encoder_where_it_adds_to_the_neighbourhood(informed):
    """The gap shows which queries lie between two labels, of which half have the farther one. Of
    those that the encoder doubts, nearly all have the farther one, which no gap shows.
    """
    rng = np.random.default_rng(0)
    pairs, n = 30, 3000

    def at(pair, offset):
        noise = rng.normal(0, 0.6, (len(pair), 6))
        return np.column_stack([10 * np.eye(pairs)[pair], offset, noise])

    places = np.repeat(np.arange(2 * pairs), 3)
    labels, between, doubt = rng.integers(2 * pairs, size=n), rng.random(n) < 0.5, rng.random(n)
    swapped = (doubt > 0.7) & (rng.random(n) < 0.95) & ~between
    middle = rng.normal(2, 0.2, n)
    vectors = at(labels // 2, np.where(between, middle, 4.0 * ((labels % 2) != swapped)))
    ends = at(places // 2, 4.0 * (places % 2))
    retriever = rcir.Retriever.from_embeddings(ends, labels=places, depth=20)
    report = retriever.calibrate(
        vectors, labels, uncertainty=doubt if informed else rng.random(n), alphas=(0.25,)
    )
    assert report.chosen.sizes["gap"][0.25] < report.chosen.sizes["encoder"][0.25]
    assert (retriever.calibration.uncertainty == "encoder") == informed


@pytest.mark.statistical
def test_choosing_an_uncertainty_on_the_tuning_split_keeps_the_guarantee(request):
    """Choosing the noise with the smallest sets on the calibration queries breaks it."""
    trials = 400 if request.config.getoption("full") else 40
    alpha = delta = 0.1
    wanted = rcir.risk.make_request(alpha, delta)
    violated = {"tuning": 0, "calibration": 0}
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        ranks = rng.integers(1, 12, 60 + 60 + 2000)
        parts = [slice(0, 60), slice(60, 120), slice(120, None)]
        noises = {str(k): rng.uniform(size=len(ranks)) for k in range(20)}

        def split(kind, part, ranks=ranks, noises=noises, parts=parts):
            return results(noises[kind][parts[part]], ranks[parts[part]])

        def sets(kind, fitted_on, measured, split=split):
            fitted = split(kind, fitted_on)
            function = rcir.risk.Quantile.fit(fitted.results, fitted.ranks)
            certificate = rcir.risk.certify(wanted, rcir.risk.score(function, split(kind, 1)))
            return function.sizes(split(kind, measured).results, certificate.threshold)

        kind, _ = smallest_uncertainty({k: split(k, 0) for k in noises})
        violated["tuning"] += (ranks[parts[2]] > sets(kind, 0, 2)).mean() > alpha
        kind = min(noises, key=lambda k, sets=sets: sets(k, 1, 1).mean())
        violated["calibration"] += (ranks[parts[2]] > sets(kind, 1, 2)).mean() > alpha
    noise = 3 * np.sqrt(delta * (1 - delta) * trials)
    assert violated["tuning"] <= delta * trials + noise
    assert violated["calibration"] > delta * trials + noise
