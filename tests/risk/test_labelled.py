from dataclasses import replace

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import Constant, LabelledResults, Quantile, Reranked, SearchResults
from rcir.risk.risks import find_risk

RISKS = ("miss", "recall", "false-discovery")


@pytest.fixture(scope="module")
def drawn(queries):
    """60 queries scored by a quantile score function; two have no true match anywhere."""
    results, relevant, totals = queries(60, seed=0)
    relevant[:2], totals[:2] = False, 0
    score_function = Quantile(np.sort(queries(40, seed=1)[0].uncertainty))
    return LabelledResults.of(results, relevant, totals).scored(score_function)


def naive_loss(risk, held, relevant, total):
    """The loss of the set of the columns `held`."""
    hits = sum(bool(relevant[k]) for k in held)
    if risk == "miss":
        return 0.0 if hits else 1.0
    if risk == "recall":
        return 1 - hits / total if total else 1.0
    return 1 - hits / len(held)


def thresholds_of(labelled):
    finite = labelled.candidate_scores[np.isfinite(labelled.candidate_scores)]
    extra = np.array([0.0, 0.37, 5.25, 1e6], np.float32)
    return np.unique(np.concatenate([finite, extra]))


@pytest.mark.parametrize("risk", RISKS)
def test_losses_are_those_of_every_set_on_its_own(risk, drawn):
    thresholds = thresholds_of(drawn)
    losses = find_risk(risk).losses(drawn, thresholds)
    assert losses.shape == (60, len(thresholds))
    for i in range(60):
        for g in range(0, len(thresholds), 5):
            held = [k for k in range(12) if drawn.candidate_scores[i, k] <= thresholds[g]]
            expected = naive_loss(risk, held, drawn.relevant[i], drawn.totals[i])
            assert losses[i, g] == pytest.approx(expected, abs=1e-15), (i, g)


@pytest.mark.parametrize("risk", RISKS)
def test_a_single_threshold_gives_the_column_of_many(risk, drawn):
    thresholds = thresholds_of(drawn)
    many = find_risk(risk).losses(drawn, thresholds)
    for g in (0, 3, len(thresholds) // 2, len(thresholds) - 1):
        np.testing.assert_array_equal(
            find_risk(risk).losses(drawn, thresholds[g : g + 1])[:, 0], many[:, g]
        )


@pytest.mark.parametrize("risk", RISKS)
def test_a_query_without_any_true_match_loses_everything(risk, drawn):
    assert (find_risk(risk).losses(drawn, thresholds_of(drawn))[:2] == 1).all()


def test_padding_is_in_no_set_and_no_denominator():
    candidate_scores = np.array([[0, 1, np.inf, np.inf]], np.float32)
    relevant = np.array([[True, False, False, False]])
    labelled = LabelledResults.from_arrays(
        {
            "candidate_scores": candidate_scores,
            "relevant": relevant,
            "totals": np.array([2]),
            "uncertainty": np.zeros(1),
            "selection_score": np.zeros(1),
        }
    )
    thresholds = np.array([0, 1, 1e30], np.float32)
    assert find_risk("false-discovery").losses(labelled, thresholds).tolist() == [[0, 0.5, 0.5]]
    assert find_risk("recall").losses(labelled, thresholds).tolist() == [[0.5, 0.5, 0.5]]


def test_a_threshold_in_double_precision_means_the_same_set_for_every_risk():
    candidate_scores, relevant = np.array([[0, 0.1]], np.float32), np.array([[False, True]])
    labelled = LabelledResults.from_arrays(
        {
            "candidate_scores": candidate_scores,
            "relevant": relevant,
            "totals": np.array([1]),
            "uncertainty": np.zeros(1),
            "selection_score": np.zeros(1),
        }
    )
    losses = [float(find_risk(risk).losses(labelled, np.array([0.1]))[0, 0]) for risk in RISKS]
    assert losses == [0.0, 0.0, 0.5]  # the set of a threshold of 0.1 holds both


def test_ranks_and_scores_are_those_of_the_first_true_match(drawn):
    for i in range(60):
        matches = [k for k in range(12) if drawn.relevant[i, k]]
        assert drawn.ranks[i] == (matches[0] + 1 if matches else np.inf)
        assert drawn.scores[i] == (drawn.candidate_scores[i, matches[0]] if matches else np.inf)


def test_they_keep_what_the_score_function_says_of_the_queries(queries):
    results, relevant, totals = queries(30, seed=2)
    labelled = LabelledResults.of(results, relevant, totals).scored(Constant())
    np.testing.assert_array_equal(labelled.candidate_scores, Constant().candidate_scores(results))
    np.testing.assert_array_equal(labelled.uncertainty, results.uncertainty)
    np.testing.assert_array_equal(labelled.selection_score, results.uncertainty)


def test_a_subset_and_stored_arrays_keep_every_value(drawn):
    rows = np.arange(60) % 4 == 1
    restored = LabelledResults.from_arrays({k: v.copy() for k, v in drawn.arrays().items()})
    for name in ("candidate_scores", "relevant", "totals", "uncertainty", "selection_score"):
        np.testing.assert_array_equal(getattr(drawn[rows], name), getattr(drawn, name)[rows])
        np.testing.assert_array_equal(getattr(restored, name), getattr(drawn, name))
        assert getattr(restored, name).dtype == getattr(drawn, name).dtype


def test_what_does_not_fit_together_is_refused():
    queries, two = SearchResults(np.zeros(2), 3), np.zeros((2, 3), bool)
    for relevant, totals in ((two[:, :2], np.ones(2, int)), (two, np.ones(3, int))):
        with pytest.raises(InvalidData, match="needed is"):
            LabelledResults.of(queries, relevant, totals).scored(Constant())
    with pytest.raises(InvalidData, match="needed is"):
        LabelledResults.of(queries[:0], two[:0], np.ones(0, int)).scored(Constant())
    with pytest.raises(InvalidData, match="more true matches"):
        LabelledResults.of(queries, ~two, np.array([3, 2])).scored(Constant())
    labelled = LabelledResults.of(queries, two, np.ones(2, int)).scored(Constant())
    with pytest.raises(InvalidConfig, match="choose one of miss, recall, false-discovery"):
        find_risk("misses").losses(labelled, np.zeros(1, np.float32))


def test_the_loss_of_a_cluster_is_the_mean_of_its_queries(drawn):
    clusters = np.random.default_rng(0).integers(0, 9, 60) * 7 - 3
    clustered = replace(drawn, clusters=clusters, cluster="video")
    thresholds = thresholds_of(drawn)[::9]
    assert (drawn.units, clustered.units) == (60, len(set(clusters.tolist())))
    for risk in RISKS:
        each = find_risk(risk).losses(drawn, thresholds)
        np.testing.assert_array_equal(find_risk(risk).unit_losses(drawn, thresholds), each)
        expected = [
            [np.mean([row[g] for row, c in zip(each, clusters, strict=True) if c == cluster])]
            for cluster in sorted(set(clusters.tolist()))
            for g in range(len(thresholds))
        ]
        found = find_risk(risk).unit_losses(clustered, thresholds)
        assert found.ravel().tolist() == pytest.approx(np.ravel(expected).tolist())


def test_clusters_are_kept_by_subsets_and_in_storage(drawn):
    clustered = replace(drawn, clusters=np.arange(60) // 4, cluster="video")
    rows = np.array([7, 2, 40])
    assert clustered[rows].clusters.tolist() == [1, 0, 10]
    assert (
        LabelledResults.from_arrays(clustered.arrays(), cluster="video").clusters.tolist()
        == clustered.clusters.tolist()
    )
    assert "clusters" not in drawn.arrays()
    assert drawn[rows].clusters is None
    with pytest.raises(InvalidData, match="60 queries, clusters"):
        replace(drawn, clusters=np.zeros(59, int), cluster="video")


@pytest.mark.parametrize("number", [2, 17, 10_000])
def test_steps_are_scores_that_the_mean_size_grows_by_evenly_in_its_logarithm(number, drawn):
    all_scores = sorted(drawn.candidate_scores[np.isfinite(drawn.candidate_scores)].tolist())
    largest = len(all_scores) / 60
    means = [largest ** (place / (number - 1)) for place in range(number)]
    expected = {all_scores[min(int(mean * 60 + 1e-9), len(all_scores)) - 1] for mean in means}
    steps = drawn.steps(number).tolist()
    assert steps == sorted(steps)
    assert len(set(steps) ^ expected) <= 2  # but for rounding
    assert (steps[0], steps[-1]) == (0, all_scores[-1])


def test_queries_that_are_joined_follow_each_other(queries):
    first, second = (LabelledResults.of(*queries(n, seed=n)).scored(Constant()) for n in (20, 13))
    both = first.joined(second)
    for name in ("candidate_scores", "relevant", "totals", "uncertainty", "selection_score"):
        values = [*getattr(first, name).tolist(), *getattr(second, name).tolist()]
        assert getattr(both, name).tolist() == values
        assert getattr(both, name).dtype == getattr(first, name).dtype
    assert both.ranks.tolist() == [*first.ranks.tolist(), *second.ranks.tolist()]
    shallow = LabelledResults.of(*queries(13, seed=1, depth=5)).scored(Constant())
    clustered = replace(second, clusters=np.arange(13), cluster="video")
    for one, other in ((first, shallow), (first, clustered), (clustered, first)):
        with pytest.raises(InvalidData, match="cannot be added"):
            one.joined(other)


def test_queries_are_kept_in_the_order_in_which_the_score_function_takes_candidates(one_key):
    results, relevant, totals = one_key(60, 0)
    score_function = Reranked.fit(results, relevant)
    labelled = LabelledResults.of(results, relevant, totals).scored(score_function)
    columns = score_function.ordered(results)[1].tolist()
    moved = [[bool(row[k]) for k in order] for row, order in zip(relevant, columns, strict=True)]
    assert labelled.relevant.tolist() == moved
    np.testing.assert_array_equal(
        labelled.candidate_scores, score_function.candidate_scores(results)
    )
    np.testing.assert_array_equal(
        labelled.selection_score, score_function.selection_score(results, 1)
    )
