"""The probability of each candidate to match, against scikit-learn's regression of all of them."""

import itertools

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import Constant, LabelledResults, MatchProbability, matching


@pytest.fixture(scope="module")
def drawn(one_key):
    return one_key(120, 0)


@pytest.fixture(scope="module")
def fitted(drawn):
    return MatchProbability.fit(drawn[0], drawn[1])


@pytest.fixture(scope="module")
def naive(drawn, describe):
    """Of (results, i, k): the probability of that candidate."""
    split, relevant, _ = drawn
    cells = [(i, k) for i in range(len(split)) for k in range(split.depth) if split.there[i, k]]
    rows = [describe(split, i, k, split) for i, k in cells]
    exact = LogisticRegression(tol=1e-10, max_iter=10_000)
    model = make_pipeline(StandardScaler(), exact).fit(rows, [relevant[cell] for cell in cells])

    def probability(results, i, k):
        if not results.there[i, k]:
            return 0.0
        return float(model.predict_proba([describe(results, i, k, split)])[0, 1])

    return probability


def test_candidates_are_taken_by_the_probability_of_a_regression_of_all(fitted, naive, one_key):
    asked = one_key(30, 1)[0]
    ordered, columns = fitted.ordered(asked)
    moved = 0
    for i in range(30):
        chances = [naive(asked, i, k) for k in range(asked.depth)]
        order = sorted(range(asked.depth), key=lambda k, chances=chances: -chances[k])
        assert columns[i].tolist() == order
        expected = [chances[k] for k in order]
        assert ordered.probability[i].tolist() == pytest.approx(expected, abs=1e-5)
        moved += order != sorted(order)
        for name in ("distances", "keys"):
            row = getattr(asked, name)[i]
            assert getattr(ordered, name)[i].tolist() == [row[k] for k in order]
    assert moved > 10


@pytest.mark.parametrize("columns", [1, 3, 50])
def test_as_many_candidates_as_are_needed_are_the_first_of_all(fitted, one_key, columns):
    asked = one_key(40, 1)[0]
    (whole, order), (found, taken) = fitted.ordered(asked), fitted.ordered(asked, columns)
    np.testing.assert_array_equal(taken, order[:, :columns])
    for name in ("distances", "keys", "probability"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[:, :columns])


def test_scores_are_one_over_probabilities_and_never_fall(fitted, one_key):
    asked = one_key(200, 2)[0]
    ordered, columns = fitted.ordered(asked)
    candidate_scores = fitted.candidate_scores(asked)
    np.testing.assert_array_equal(fitted.candidate_scores(ordered), candidate_scores)
    assert fitted.ordered(ordered)[1] is None  # ordered once, not twice
    for i, row in enumerate(candidate_scores):
        there = asked.there[i, columns[i]]
        expected = np.array([0.0, *(1 / np.maximum(ordered.probability[i, 1:], 1e-9))])
        np.testing.assert_allclose(row[there], expected[there], rtol=1e-6)
        assert (row[~there] == np.inf).all()
        assert (row[1:] >= row[:-1]).all()


def test_selection_score_is_the_product_of_the_chances_that_each_candidate_taken_is_none(
    fitted, naive, one_key
):
    asked = one_key(10, 3)[0]
    for size, i in itertools.product((1, 3), range(10)):
        chances = sorted(naive(asked, i, k) for k in range(asked.depth))[::-1]
        expected = np.prod([1 - chance for chance in chances[:size]])
        assert fitted.selection_score(asked, size)[i] == pytest.approx(expected, abs=1e-5)


def test_a_query_is_sized_alone_as_among_many_and_a_score_is_the_price_of_its_place(
    fitted, one_key
):
    asked, relevant, totals = one_key(40, 4)
    candidate_scores, (_, columns) = fitted.candidate_scores(asked), fitted.ordered(asked)
    labelled = LabelledResults.of(asked, relevant, totals).scored(fitted)
    ranks = np.arange(40) % asked.depth + 1.0
    scores = fitted.scores(asked, ranks)
    for i in range(40):
        one, place = asked[i : i + 1], columns[i].tolist().index(int(ranks[i]) - 1)
        assert scores[i] == candidate_scores[i, place]
        assert labelled.relevant[i].tolist() == relevant[i][columns[i]].tolist()
        np.testing.assert_allclose(fitted.candidate_scores(one)[0], candidate_scores[i], rtol=1e-6)
        for threshold in (0.0, 1.3, 4.0):
            held = int(np.sum(candidate_scores[i] <= threshold * (1 + 1e-3)))
            assert fitted.sizes(one, threshold).tolist() == [held]


def test_of_many_candidates_some_are_fitted_on(drawn, monkeypatch):
    results, relevant, _ = drawn
    found = []
    fit = matching.fit_logistic

    def seen(rows, positive):
        found.append((rows, positive))
        return fit(rows, positive)

    monkeypatch.setattr(matching, "fit_logistic", seen)
    MatchProbability.fit(results, relevant)
    monkeypatch.setattr(matching, "MOST_CANDIDATES", 300)
    MatchProbability.fit(results, relevant)
    (every, matches), (some, few) = found
    assert (len(every), len(some)) == (int(results.there.sum()), 300)
    known = {(*row, match) for row, match in zip(every.tolist(), matches.tolist(), strict=True)}
    assert {(*row, match) for row, match in zip(some.tolist(), few.tolist(), strict=True)} < known


def test_first_matches_alone_are_refused(drawn):
    with pytest.raises(InvalidData, match="fitted on all matches, not on the first"):
        MatchProbability.fit(drawn[0], np.ones(120))


def test_a_stored_model_is_the_same_model(fitted, drawn):
    restored = MatchProbability.from_state({name: v.copy() for name, v in fitted.state().items()})
    np.testing.assert_array_equal(
        restored.candidate_scores(drawn[0]), fitted.candidate_scores(drawn[0])
    )
    np.testing.assert_array_equal(
        restored.selection_score(drawn[0], 3), fitted.selection_score(drawn[0], 3)
    )


def test_sets_of_one_mean_size_hold_more_true_matches_than_those_of_a_constant(fitted, one_key):
    asked, relevant, totals = one_key(1000, 5)
    constant, learned = (
        LabelledResults.of(asked, relevant, totals).scored(score_function)
        for score_function in (Constant(), fitted)
    )
    for size in (1, 3):
        held = constant.candidate_scores <= size
        threshold = np.sort(learned.candidate_scores.ravel())[held.sum() - 1]
        same = learned.candidate_scores <= threshold
        assert abs(same.sum() - held.sum()) <= 1
        assert learned.relevant[same].sum() > 1.15 * constant.relevant[held].sum()
