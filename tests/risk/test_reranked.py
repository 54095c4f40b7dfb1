"""Labels ranked anew, against a conditional logit that SciPy fits on loops over labels."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from rcir.errors import InvalidData
from rcir.risk import LabelledResults, Learned, MissController, Reranked, SearchResults
from rcir.risk import reranked as module


def first(relevant):
    return np.array([1.0 + row.index(True) if True in row else np.inf for row in relevant.tolist()])


def nearest(results, i):
    """Columns of the nearest candidate of each key of query i, in their order."""
    row = results.keys[i].tolist()
    return [k for k, key in enumerate(row) if key >= 0 and key not in row[:k]]


def of_labels(results, i, describe, split):
    """Features of each key of query i, in a ranking that holds every key once."""
    columns = nearest(results, i)
    row = results.keys[i].tolist()
    once = SearchResults(
        results.uncertainty[i : i + 1],
        results.depth,
        np.array([[*results.distances[i, columns], *[np.inf] * (results.depth - len(columns))]]),
        None,
        results.candidate_uncertainty[i : i + 1, columns + [0] * (results.depth - len(columns))],
    )
    table = []
    for place, column in enumerate(columns):
        values = describe(once, 0, place, split)
        # votes of the key among all candidates, keys so far, none of its own before it
        values[-1:-1] = [row[:30].count(row[column]), np.log(place + 1), 0.0]
        table.append(values)
    return np.array(table)


@pytest.fixture(scope="module")
def drawn(one_key):
    return one_key(150, 0)


@pytest.fixture(scope="module")
def fitted(drawn):
    results, relevant, _ = drawn
    return Reranked.fit(results, relevant)


def by_scipy(split, relevant, fitted_on, describe):
    """Of (results, i): probability of each key, then that of none, by another optimiser."""
    tables = [of_labels(split, i, describe, split) for i in fitted_on]
    right = []
    for i, table in zip(fitted_on, tables, strict=True):
        hits = [relevant[i, column] for column in nearest(split, i)]
        right.append(hits.index(True) if True in hits else len(table))
    rows = np.concatenate(tables)
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    spread[spread == 0] = 1

    def chances(weights, table):
        utilities = [*((table - mean) / spread @ weights[:-1]), weights[-1]]
        powers = np.exp(np.array(utilities) - max(utilities))
        return powers / powers.sum()

    def loss(weights):
        likelihood = sum(
            np.log(chances(weights, table)[place])
            for table, place in zip(tables, right, strict=True)
        )
        return -likelihood / len(tables) + 1e-4 * weights @ weights

    found = minimize(loss, np.zeros(len(mean) + 1), method="BFGS", options={"gtol": 1e-7})
    return lambda results, i: chances(found.x, of_labels(results, i, describe, split))


@pytest.fixture(scope="module")
def naive(drawn, describe):
    return by_scipy(*drawn[:2], range(150), describe)


@pytest.mark.parametrize("columns", [1, 3, 9, 20])
def test_as_many_candidates_as_are_needed_are_the_first_of_all(fitted, one_key, columns):
    asked = one_key(40, 1)[0]
    whole, order = fitted.ordered(asked)
    found, taken = fitted.ordered(asked, columns)
    shown = min(columns, asked.depth)
    np.testing.assert_array_equal(taken, order[:, :shown])
    assert found.depth == shown
    for name in ("distances", "keys", "probability"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[:, :shown])


@pytest.mark.parametrize("threshold", [0, 1, 1.5, 4, 30, 1e6])
def test_no_set_exceeds_the_most_of_its_threshold(fitted, one_key, threshold):
    asked = one_key(200, 2)[0]
    scores = fitted.candidate_scores(asked)
    sizes = np.maximum((scores <= threshold * (1 + 1e-3)).sum(axis=1), 1)
    assert sizes.max() <= fitted.most(threshold)
    np.testing.assert_array_equal(fitted.sizes(asked, threshold), sizes)


def test_probabilities_and_order_are_those_of_a_conditional_logit(fitted, naive, one_key):
    asked = one_key(40, 1)[0]
    ordered, columns = fitted.ordered(asked)
    moved = 0
    for i in range(40):
        chances = naive(asked, i)[:-1]
        labels = nearest(asked, i)
        order = sorted(range(len(labels)), key=lambda place, chances=chances: -chances[place])
        repeats = [k for k in range(asked.depth) if k not in labels]
        assert columns[i].tolist() == [labels[place] for place in order] + repeats
        expected = [chances[place] for place in order] + [0.0] * len(repeats)
        assert ordered.probability[i].tolist() == pytest.approx(expected, abs=1e-5)
        moved += order != sorted(order)
        for name in ("distances", "keys"):
            row = getattr(asked, name)[i]
            assert getattr(ordered, name)[i].tolist() == [row[k] for k in columns[i]]
    assert moved > 10


def test_selection_score_is_the_chance_of_none_and_of_those_that_are_not_shown(
    fitted, naive, one_key
):
    asked = one_key(30, 2)[0]
    for size in (1, 2, 9):
        selection_scores = fitted.selection_score(asked, size)
        for i in range(30):
            chances = naive(asked, i)
            left = sorted(chances[:-1].tolist())[::-1][size:]
            assert selection_scores[i] == pytest.approx(sum(left) + chances[-1], abs=1e-5)


def test_scores_are_one_over_probabilities_and_never_fall(fitted, one_key):
    asked = one_key(300, 3)[0]
    ordered, _ = fitted.ordered(asked)
    candidate_scores = fitted.candidate_scores(asked)
    np.testing.assert_array_equal(
        fitted.candidate_scores(ordered), candidate_scores
    )  # ordered once, not twice
    assert candidate_scores.dtype == np.float32
    for row, chances, there in zip(candidate_scores, ordered.probability, asked.there, strict=True):
        expected = [0.0, *(1 / max(chance, 1e-9) for chance in chances[1:])]
        assert row[there].tolist() == pytest.approx(np.array(expected)[there], rel=1e-6)
        assert (row[~there] == np.inf).all()
        assert (row[1:] >= row[:-1]).all()


def test_a_score_is_the_price_of_the_place_of_the_right_key(fitted, one_key):
    asked, relevant, totals = one_key(200, 4)
    ranks, (_, columns) = first(relevant), fitted.ordered(asked)
    scores, candidate_scores = fitted.scores(asked, ranks), fitted.candidate_scores(asked).tolist()
    labelled = LabelledResults.of(asked, relevant, totals).scored(fitted)
    for i, rank in enumerate(ranks.tolist()):
        if rank == np.inf:
            assert scores[i] == labelled.scores[i] == np.inf
            continue
        place = columns[i].tolist().index(int(rank) - 1)
        assert scores[i] == labelled.scores[i] == candidate_scores[i][place]
        assert labelled.relevant[i, place]
        assert labelled.ranks[i] == place + 1
        assert labelled.relevant[i].sum() == relevant[i].sum()


def test_one_query_is_sized_as_among_many(fitted, one_key):
    asked = one_key(40, 5)[0]
    candidate_scores, (_, columns) = fitted.candidate_scores(asked), fitted.ordered(asked)
    for i in range(40):
        one = asked[i : i + 1]
        assert fitted.ordered(one)[1][0].tolist() == columns[i].tolist()
        np.testing.assert_allclose(fitted.candidate_scores(one)[0], candidate_scores[i], rtol=1e-6)
        sizes = [
            int(np.sum(candidate_scores[i] <= threshold * (1 + 1e-3)))
            for threshold in (0.0, 1.2, 7.7, 1e12)
        ]
        assert [
            int(fitted.sizes(one, threshold)[0]) for threshold in (0.0, 1.2, 7.7, 1e12)
        ] == sizes


def test_rankings_that_hold_every_key_once_are_ranked_alike(drawn, fitted, one_key):
    asked = one_key(60, 6)[0]
    once, kept = asked.distinct(), asked.key_columns
    chances, again = fitted.ordered(asked), fitted.ordered(once)
    for i in range(60):
        labels = nearest(asked, i)
        taken = [kept[i, k] for k in again[1][i]][: len(labels)]
        assert taken == chances[1][i, : len(labels)].tolist()
    np.testing.assert_allclose(again[0].probability, chances[0].probability, rtol=1e-9)
    assert np.isposinf(fitted.candidate_scores(once)[kept.max(axis=1) < 0]).all()
    distinct, columns = drawn[0].distinct(), drawn[0].key_columns
    matches = np.take_along_axis(drawn[1], np.maximum(columns, 0), axis=1) & (columns >= 0)
    of_distinct = Reranked.fit(distinct, matches)
    np.testing.assert_allclose(of_distinct.weights, fitted.weights, rtol=1e-6, atol=1e-9)


def test_first_matches_and_all_matches_fit_the_same(drawn, fitted):
    results, relevant, _ = drawn
    np.testing.assert_array_equal(Reranked.fit(results, first(relevant)).weights, fitted.weights)


def test_of_many_queries_some_are_fitted_on(drawn, describe, monkeypatch):
    results, relevant, _ = drawn
    monkeypatch.setattr(module, "MOST_QUERIES", 60)
    ordered, _ = Reranked.fit(results, relevant).ordered(results)
    some = np.random.default_rng(0).permutation(150)[:60].tolist()
    expected = by_scipy(results, relevant, some, describe)
    for i in range(0, 150, 10):
        chances = sorted(expected(results, i)[:-1].tolist())[::-1]
        assert ordered.probability[i, : len(chances)] == pytest.approx(chances, abs=1e-5)


def test_without_keys_or_with_matches_of_several_keys_it_is_refused(drawn):
    results, relevant, _ = drawn
    some = np.flatnonzero(relevant.sum(axis=1) < results.there.sum(axis=1))[0]
    wrong = np.flatnonzero(results.there[some] & ~relevant[some])[-1]
    several = relevant.copy()
    several[some, wrong] = True
    repeats = SearchResults(np.zeros(3), 3, keys=np.array([[5, 5, 7]] * 3))
    for queries, truth in (
        (replace(results, keys=None), relevant),
        (results, several),
        (repeats, np.array([1, 2, 3.0])),  # the second of its key is the first match
    ):
        assert not Reranked.suits(queries, truth)
        with pytest.raises(InvalidData, match="matches all have one: choose learned sizes"):
            Reranked.fit(queries, truth)
    assert Reranked.suits(results, relevant)
    assert Reranked.suits(results, first(relevant))


@pytest.mark.parametrize("missing", ["distances", "keys", "candidate_uncertainty"])
def test_what_it_was_fitted_with_must_be_known_of_queries(missing, fitted, drawn):
    with pytest.raises(InvalidData, match=f"fitted with {missing}, which the queries lack"):
        fitted.candidate_scores(replace(drawn[0], **{missing: None}))


def test_a_stored_model_is_the_same_model(fitted, drawn):
    restored = Reranked.from_state({name: v.copy() for name, v in fitted.state().items()})
    np.testing.assert_array_equal(
        restored.candidate_scores(drawn[0]), fitted.candidate_scores(drawn[0])
    )
    np.testing.assert_array_equal(
        restored.selection_score(drawn[0], 3), fitted.selection_score(drawn[0], 3)
    )


def test_queries_of_which_none_or_all_have_a_match_are_fitted_without_warning(drawn):
    results, _, _ = drawn
    for ranks in (np.full(150, np.inf), np.ones(150)):
        score_function = Reranked.fit(results, ranks)
        candidate_scores = score_function.candidate_scores(results)
        assert (candidate_scores[:, 0] == 0).all()
        assert (candidate_scores[:, 1:] >= candidate_scores[:, :-1]).all()


def test_it_needs_smaller_sets_than_an_order_by_distance_where_candidates_tell(one_key):
    split, calibration, (asked, relevant, _) = (one_key(1000, seed) for seed in (7, 8, 9))
    sizes = {}
    for kind in (Learned, Reranked):
        score_function = kind.fit(split[0], split[1])
        controller = MissController.calibrate(score_function, calibration[0], first(calibration[1]))
        threshold = controller.threshold(0.3, 0.1)
        assert np.mean(score_function.scores(asked, first(relevant)) > threshold) < 0.32
        sizes[kind] = controller.sizes(asked, threshold).mean()
    assert sizes[Reranked] < 0.9 * sizes[Learned]
