"""Which uncertainty a retriever goes by: the queries' own, 1 - cosine, the neighbours' vote."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidConfig, StaleCalibration
from rcir.risk import LabelledResults, SearchResults, smallest_uncertainty

CENTRES = np.random.default_rng(0).standard_normal((12, 6))


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(12, size=n)
    return (CENTRES[labels] + 0.8 * rng.standard_normal((n, 6))).astype(np.float32), labels


GALLERY, LABELS = drawn(300, 1)
ASKED, ASKED_LABELS = drawn(600, 2)


@pytest.fixture
def own():
    return rcir.Retriever.from_embeddings(GALLERY, labels=LABELS)


def by_hand(queries):
    """One minus the cosine to the nearest, the share of 30 that have another label than it, and how
    far the nearest is, measured by the nearest of another label.
    """
    apart = cdist(queries, GALLERY, "cosine")
    near = np.argsort(apart, axis=1)[:, :30]
    first = LABELS[near[:, :1]]
    vote = (LABELS[near] == first).mean(1)
    other = np.where(first == LABELS, np.inf, apart).min(1)
    return {"cosine": apart.min(1), "vote": 1 - vote, "gap": np.sqrt(apart.min(1) / other)}


@pytest.mark.parametrize("kind", ["cosine", "vote", "gap"])
def test_uncertainties_are_those_by_hand(own, kind):
    found = own.search(ASKED[:50])
    expected = by_hand(ASKED[:50])
    np.testing.assert_allclose(own.judged(found, kind).uncertainty, expected[kind], atol=1e-5)
    np.testing.assert_allclose(found.uncertainty, expected["cosine"], atol=1e-5)


def test_their_own_uncertainty_is_that_which_they_came_with(own):
    stated = np.linspace(0, 1, 50)
    found = own.search_labelled(own.labelled(ASKED[:50], ASKED_LABELS[:50], stated))
    np.testing.assert_array_equal(found.uncertainty, stated)
    voted = own.judged(found, "vote")
    np.testing.assert_allclose(voted.uncertainty, by_hand(ASKED[:50])["vote"], atol=1e-12)
    np.testing.assert_array_equal(own.judged(voted, "own").uncertainty, stated)


def test_places_vote_too():
    places = np.random.default_rng(1).uniform(0, 10, (300, 2))
    own = rcir.Retriever.from_embeddings(GALLERY, labels=WithinRadius(places, 3.0))
    found = own.judged(own.search(ASKED[:20]), "vote")
    near = cdist(places, places) <= 3
    expected = [1 - near[row[0], row[:30]].mean() for row in found.positions]
    np.testing.assert_allclose(found.uncertainty, expected, atol=1e-12)


def test_the_gap_without_labels_is_to_the_second_and_of_equal_distances_one():
    vectors = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    asked = np.array([[1, 0], [0.6, 0.8]], np.float32)
    own = rcir.Retriever.from_embeddings(vectors[:2])
    found = own.judged(own.search(asked), "gap")
    np.testing.assert_allclose(found.uncertainty, [0, np.sqrt(0.4 / 0.8)], atol=1e-6)
    twice = rcir.Retriever.from_embeddings(vectors)
    np.testing.assert_array_equal(twice.judged(twice.search(asked[:1]), "gap").uncertainty, [1])
    alike = rcir.Retriever.from_embeddings(vectors[:2], labels=[5, 5])
    np.testing.assert_array_equal(alike.judged(alike.search(asked), "gap").uncertainty, [0, 0])


def test_the_spread_of_places_is_that_by_hand():
    places = np.random.default_rng(1).uniform(0, 10, (300, 2))
    own = rcir.Retriever.from_embeddings(GALLERY, labels=WithinRadius(places, 3.0))
    found = own.judged(own.search(ASKED[:20]), "spread")
    near = places[found.positions[:, :10]]
    expected = np.sqrt(near.var(axis=1).sum(axis=1))
    np.testing.assert_allclose(found.uncertainty, expected)
    few = rcir.Retriever.from_embeddings(GALLERY[:3], labels=WithinRadius(places[:3], 3.0))
    spread = few.judged(few.search(ASKED[:2]), "spread").uncertainty
    np.testing.assert_allclose(spread, np.sqrt(places[:3].var(axis=0).sum()))


@pytest.mark.parametrize("kind", ["own", "cosine", "vote", "gap"])
def test_answers_go_by_the_uncertainty_that_was_calibrated_with(own, tmp_path, kind):
    own.calibrate(ASKED, ASKED_LABELS, "minmax", judged_by=kind)
    loaded = rcir.load(own.save(tmp_path / "own"))
    assert loaded.uncertainty == kind
    new, _ = drawn(30, 7)
    expected = by_hand(new)["cosine" if kind == "own" else kind]
    for one in (own, loaded):
        answers = one.retrieve(new, 0.3, 0.1)
        found = [answer.uncertainty for answer in answers]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    loaded.add(new, [f"new {row}" for row in range(30)], [0] * 30)
    loaded.recalibrate()
    assert loaded.uncertainty == kind


def test_another_uncertainty_makes_a_calibration_stale(own):
    own.calibrate(ASKED, ASKED_LABELS, judged_by="vote")
    own.uncertainty = "cosine"
    with pytest.raises(StaleCalibration, match="changed since calibration: uncertainty"):
        own.retrieve(ASKED[0] + 0.1, 0.3, 0.1)


def test_auto_takes_what_needs_the_smallest_sets(own):
    report = own.calibrate(ASKED, ASKED_LABELS, "quantile", judged_by="auto")
    assert own.uncertainty == "vote"
    assert set(report.uncertainties) == {"own", "cosine", "vote", "gap"}
    sizes = {
        kind: own.calibrate(ASKED, ASKED_LABELS, "quantile", judged_by=kind).rows[1].mean_size
        for kind in ("cosine", "vote")
    }
    assert sizes["vote"] < sizes["cosine"]


def judged_by(uncertainty, ranks, depth=30):
    relevant = ranks[:, None] == np.arange(1, depth + 1)
    results = SearchResults(uncertainty, depth)
    return LabelledResults.of(results, relevant, np.ones(len(ranks), np.int64))


def test_the_first_stays_where_others_are_no_better_or_nothing_can_be_compared():
    rng = np.random.default_rng(0)
    ranks = rng.integers(1, 10, 400)
    noise, oracle = rng.uniform(size=400), ranks / 10
    name, sizes = smallest_uncertainty(
        {"noise": judged_by(noise, ranks), "oracle": judged_by(oracle, ranks)}
    )
    assert name == "oracle"
    assert sizes["oracle"][0.1] < sizes["noise"][0.1]
    same = {"first": judged_by(noise, ranks), "second": judged_by(noise, ranks)}
    assert smallest_uncertainty(same)[0] == "first"
    few = {
        name: judged_by(values[:40], ranks[:40])
        for name, values in {"a": noise, "b": oracle}.items()
    }
    assert smallest_uncertainty(few) == ("a", {})


@pytest.mark.parametrize(
    ("size", "taken"),
    [(1.9, "told"), (2.1, "told"), (2.3, "noise")],
    ids=["smaller", "close", "larger"],
)
def test_of_sizes_that_are_close_the_one_that_tells_misses_better_is_taken(
    monkeypatch, size, taken
):
    rng = np.random.default_rng(1)
    ranks = rng.integers(1, 3, 200)
    noise = rng.uniform(size=200)
    candidates = {"noise": judged_by(noise, ranks), "told": judged_by(noise + ranks, ranks)}
    sizes = iter([{0.1: 2.0}, {0.1: size}])
    monkeypatch.setattr("rcir.risk.choice._sizes", lambda *_: next(sizes))
    assert smallest_uncertainty(candidates, alphas=(0.1,))[0] == taken


@pytest.mark.parametrize("kind", ["variance", 3, None])
def test_an_unknown_uncertainty_is_refused(own, kind):
    with pytest.raises(InvalidConfig, match=f"uncertainty {kind!r} is unknown; choose one of own"):
        own.calibrate(ASKED, ASKED_LABELS, judged_by=kind)


def test_a_gallery_without_labels_does_not_vote(retriever, splits):
    from rcir.retrieval.retriever import Retriever

    bare = Retriever(
        retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids, depth=50
    )
    found = bare.search(splits.test.images[:5])
    with pytest.raises(InvalidConfig, match=r"'vote' cannot be had.*choose one of own, cosine"):
        bare.judged(found, "vote")


@pytest.mark.statistical
def test_choosing_an_uncertainty_on_the_tuning_split_keeps_the_guarantee(request):
    """Whoever takes the noise that certifies the smallest sets on the calibration queries breaks
    it.
    """
    trials = 400 if request.config.getoption("full") else 60
    alpha = delta = 0.1
    asked = rcir.risk.Request(alpha, delta)
    violated = {"tuning": 0, "calibration": 0}
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        ranks = rng.integers(1, 12, 60 + 60 + 2000)
        parts = [slice(0, 60), slice(60, 120), slice(120, None)]
        noises = {str(k): rng.uniform(size=len(ranks)) for k in range(30)}
        splits = {
            k: [judged_by(noise[part], ranks[part]) for part in parts]
            for k, noise in noises.items()
        }

        def sets(kind, fitted_on, measured, splits=splits):
            own = splits[kind]
            fitted = rcir.risk.Quantile.fit(own[fitted_on], own[fitted_on].ranks)
            controller = rcir.risk.RiskController(fitted, own[0], own[1])
            return controller.sets(own[measured], controller.decide(asked))[1]

        kind, _ = smallest_uncertainty({k: own[0] for k, own in splits.items()})
        violated["tuning"] += (ranks[parts[2]] > sets(kind, 0, 2)).mean() > alpha
        kind = min(noises, key=lambda k: sets(k, 1, 1).mean())
        violated["calibration"] += (ranks[parts[2]] > sets(kind, 1, 2)).mean() > alpha
    noise = 3 * np.sqrt(delta * (1 - delta) * trials)
    assert violated["tuning"] <= delta * trials + noise
    assert violated["calibration"] > delta * trials + noise
