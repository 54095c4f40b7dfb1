"""Search results, their labels and their losses, against plain loops."""

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics.labels import (
    NO_CANDIDATE,
    count_votes,
    earlier_of_same_label,
    first_of_each_label,
)
from rcir.risk import (
    Constant,
    LabelledResults,
    Quantile,
    ScoredResults,
    SearchResults,
    find_risk,
    score,
)
from rcir.store.codec import decode, encode
from tests.populations import in_population
from tests.risk.conftest import naive_loss

RISKS = ("miss", "recall", "false-discovery")
STORED = ("scores", "relevant", "n_relevant", "uncertainty", "selection_score")
PER_CANDIDATE = ("distances", "labels", "candidate_uncertainty", "votes")


def draw_keys(shape, labels=5, seed=0, stretch=1_000_003):
    """Keys of candidates, from -2 on; some rows end early."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-2, labels - 2, shape) * stretch
    ends = rng.integers(1, shape[1] + 1, shape[0])
    keys[np.arange(shape[1]) >= ends[:, None]] = NO_CANDIDATE
    return keys


@pytest.fixture
def results():
    """Twenty queries with everything that can accompany a candidate."""
    rng = np.random.default_rng(0)
    keys = draw_keys((20, 40))
    distances = np.where(keys == NO_CANDIDATE, np.inf, np.sort(rng.uniform(size=(20, 40)), axis=1))
    return SearchResults(rng.uniform(size=20), 40, distances, keys, rng.uniform(size=(20, 40)))


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (20, 12), (9, 70), (1, 200)])
@pytest.mark.parametrize("labels", [1, 5, 1000])
@pytest.mark.parametrize(
    ("stretch", "layout"), [(1, "C"), (2**13, "F"), (2**16, "C"), (2**50, "F")]
)
def test_keys_are_located_and_counted_as_by_loops(shape, labels, stretch, layout):
    keys = np.asarray(draw_keys(shape, labels, stretch=stretch), order=layout)
    earlier, first = earlier_of_same_label(keys), first_of_each_label(keys)
    votes, few = count_votes(keys), count_votes(keys, keys[:, :3])
    for i, row in enumerate(keys.tolist()):
        columns = [k for k, key in enumerate(row) if key != NO_CANDIDATE and key not in row[:k]]
        assert earlier[i].tolist() == [row[:k].count(row[k]) for k in range(len(row))]
        assert first[i].tolist() == columns + [-1] * (len(row) - len(columns))
        assert votes[i].tolist() == [row[:30].count(key) for key in row]
        assert few[i].tolist() == votes[i, :3].tolist()


@pytest.mark.parametrize("power", [8, 15, 16, 17, 31, 32, 62])
def test_keys_with_equal_last_digits_are_different(power):
    keys = np.array([[0, 2**power, NO_CANDIDATE, -1, 0, 2**power, NO_CANDIDATE, -1]])
    assert earlier_of_same_label(keys).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert first_of_each_label(keys).tolist() == [[0, 1, 3, -1, -1, -1, -1, -1]]


def test_distinct_results_hold_the_nearest_candidate_of_each_key(results):
    before = [results.labels.copy(), results.distances.copy()]
    distinct, columns = results.first_of_each_label(), results.label_columns
    assert (len(distinct), distinct.depth) == (20, 40)
    assert distinct.uncertainty.tolist() == results.uncertainty.tolist()
    for i, row in enumerate(results.labels.tolist()):
        firsts = [k for k, key in enumerate(row) if key != NO_CANDIDATE and key not in row[:k]]
        missing = 40 - len(firsts)
        uncertainty = results.candidate_uncertainty[i]
        expected = {
            "distances": [*(results.distances[i, k] for k in firsts), *[np.inf] * missing],
            "labels": [*(row[k] for k in firsts), *[NO_CANDIDATE] * missing],
            "candidate_uncertainty": [*(uncertainty[k] for k in firsts), *[0.0] * missing],
            "votes": [*(row[:30].count(row[k]) for k in firsts), *[0] * missing],
        }
        assert columns[i].tolist() == firsts + [-1] * missing
        for name, values in expected.items():
            assert getattr(distinct, name)[i].tolist() == values, name
    again = distinct.first_of_each_label()
    for name in PER_CANDIDATE:
        np.testing.assert_array_equal(getattr(again, name), getattr(distinct, name))
    for values, unchanged in zip(before, (results.labels, results.distances), strict=True):
        np.testing.assert_array_equal(values, unchanged)


def test_distinct_results_end_where_keys_end_and_need_keys():
    keys = np.array([[3, 3, 8, 3], [1, 2, 3, 4]])
    distinct = SearchResults(np.zeros(2), 4, labels=keys).first_of_each_label()
    assert distinct.distances.tolist() == [[0, 0, np.inf, np.inf], [0, 0, 0, 0]]
    assert distinct.candidate_uncertainty is None
    with pytest.raises(InvalidData, match="labels"):
        SearchResults(np.zeros(2), 4).first_of_each_label()


@pytest.mark.parametrize("rows", [slice(2, 9, 3), np.array([5, 0, 5]), np.arange(20) % 3 == 1])
def test_a_subset_keeps_everything_of_its_queries(rows, results):
    subset = results[rows]
    for name in ("uncertainty", "distances", "labels", "candidate_uncertainty"):
        np.testing.assert_array_equal(getattr(subset, name), getattr(results, name)[rows])
    assert (len(subset), subset.depth, subset.votes) == (len(np.arange(20)[rows]), 40, None)


def test_impossible_results_are_refused():
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(InvalidData, match="uncertainties"):
            SearchResults(np.array([0.1, bad, 0.3]), 5)
    with pytest.raises(InvalidData, match="uncertainty has shape"):
        SearchResults(np.zeros((3, 1)), 5)
    with pytest.raises(InvalidData, match="depth"):
        SearchResults(np.zeros(3), 0)
    with pytest.raises(InvalidData, match="no candidate"):
        SearchResults(np.zeros(2), 2, np.array([[0.1, 0.2], [np.inf, np.inf]]))


@pytest.mark.parametrize("name", [*PER_CANDIDATE, "positions"])
@pytest.mark.parametrize(
    "values",
    [[[0] * 5] * 3, *(np.zeros(shape, int) for shape in ((3,), (3, 4), (2, 5)))],
    ids=["a list", "one dimension", "too few candidates", "too few queries"],
)
def test_what_is_not_an_array_of_the_candidates_is_refused_by_name(name, values):
    with pytest.raises(InvalidData, match=name):
        SearchResults(np.zeros(3), 5, **{name: values})


@pytest.fixture(scope="module")
def scored(queries):
    """60 queries scored by a quantile score function; two have no match anywhere."""
    results, relevant, totals = queries(60, seed=0)
    relevant[:2], totals[:2] = False, 0
    score_function = Quantile(np.sort(queries(40, seed=1)[0].uncertainty))
    return score(score_function, LabelledResults(results, relevant, totals))


def thresholds_of(labelled):
    finite = labelled.scores[np.isfinite(labelled.scores)]
    extra = np.array([0.0, 0.37, 5.25, 1e6], np.float32)
    return np.unique(np.concatenate([finite, extra]))


@pytest.mark.parametrize("risk", RISKS)
def test_losses_are_those_of_each_set(risk, scored):
    thresholds = thresholds_of(scored)
    losses = find_risk(risk).losses(scored, thresholds)
    assert losses.shape == (60, len(thresholds))
    for g in range(0, len(thresholds), 5):
        for i in range(60):
            included = scored.scores[i] <= thresholds[g]
            expected = naive_loss(risk, included, scored.relevant[i], scored.n_relevant[i])
            assert losses[i, g] == pytest.approx(expected, abs=1e-15), (i, g)
        alone = find_risk(risk).losses(scored, thresholds[g : g + 1])
        np.testing.assert_array_equal(alone[:, 0], losses[:, g])
    assert (losses[:2] == 1).all()  # no match in the gallery


def one_query(scores, relevant, total):
    return ScoredResults.from_scores(
        np.array([scores], np.float32), np.array([relevant]), n_relevant=np.array([total])
    )


def test_padding_is_in_no_set_and_in_no_denominator():
    labelled = one_query([0, 1, np.inf, np.inf], [True, False, False, False], 2)
    thresholds = np.array([0, 1, 1e30], np.float32)
    assert find_risk("false-discovery").losses(labelled, thresholds).tolist() == [[0, 0.5, 0.5]]
    assert find_risk("recall").losses(labelled, thresholds).tolist() == [[0.5, 0.5, 0.5]]


def test_a_threshold_in_double_precision_means_the_same_set_for_every_risk():
    labelled = one_query([0, 0.1], [False, True], 1)
    losses = [float(find_risk(risk).losses(labelled, np.array([0.1]))[0, 0]) for risk in RISKS]
    assert losses == [0.0, 0.0, 0.5]  # the set of a threshold of 0.1 holds both


def test_ranks_and_scores_are_those_of_the_first_match(scored):
    for i in range(60):
        matches = [k for k in range(12) if scored.relevant[i, k]]
        assert scored.match_rank[i] == (matches[0] + 1 if matches else np.inf)
        expected = scored.scores[i, matches[0]] if matches else np.inf
        assert scored.match_score[i] == expected


def test_subsets_and_stored_arrays_keep_every_value(scored):
    rows = np.array([7, 2, 40])
    restored = decode(ScoredResults, *encode(scored))
    for name in STORED:
        expected = getattr(scored, name)
        np.testing.assert_array_equal(getattr(scored[rows], name), expected[rows])
        np.testing.assert_array_equal(getattr(restored, name), expected)
        assert getattr(restored, name).dtype == expected.dtype
    np.testing.assert_equal(encode(restored.population), encode(scored.population))


def test_labels_that_do_not_fit_are_refused(scored):
    results, two = SearchResults(np.zeros(2), 3), np.zeros((2, 3), bool)
    for relevant, totals, name in ((two.tolist(), np.ones(2, int), "relevant"), (two, 3, "n_rel")):
        with pytest.raises(InvalidData, match=name):
            LabelledResults(results, relevant, totals)
    for relevant, totals in ((two[:, :2], np.ones(2, int)), (two, np.ones(3, int))):
        with pytest.raises(InvalidData, match="expected"):
            LabelledResults(results, relevant, totals)
    with pytest.raises(InvalidData, match="at least one"):
        LabelledResults(results[:0], two[:0], np.ones(0, int))
    with pytest.raises(InvalidData, match="n_relevant"):
        LabelledResults(results, ~two, np.array([3, 2]))
    for relevant, totals in ((two.astype(int), np.ones(2, int)), (two, np.ones(2))):
        with pytest.raises(InvalidData, match="type"):
            LabelledResults(results, relevant, totals)
    with pytest.raises(InvalidData, match="clusters"):
        in_population(scored, clusters=np.zeros(59, int), cluster_word="video")


def test_the_loss_of_a_cluster_is_the_mean_of_its_queries(scored):
    clusters = np.random.default_rng(0).integers(0, 9, 60) * 7 - 3
    clustered = in_population(scored, clusters=clusters, cluster_word="video")
    thresholds = thresholds_of(scored)[::9]
    names = sorted(set(clusters.tolist()))
    assert (scored.population.n_units, clustered.population.n_units) == (60, len(names))
    for risk in RISKS:
        each = find_risk(risk).losses(scored, thresholds)
        np.testing.assert_array_equal(find_risk(risk).unit_losses(scored, thresholds), each)
        expected = np.array([each[clusters == name].mean(axis=0) for name in names])
        assert find_risk(risk).unit_losses(clustered, thresholds) == pytest.approx(expected)


@pytest.mark.parametrize("number", [2, 17, 10_000])
def test_steps_are_scores_between_which_the_mean_size_grows_by_a_constant_factor(number, scored):
    every = sorted(scored.scores[np.isfinite(scored.scores)].tolist())
    largest = len(every) / 60
    means = [largest ** (place / (number - 1)) for place in range(number)]
    expected = {every[min(int(mean * 60 + 1e-9), len(every)) - 1] for mean in means}
    steps = scored.size_thresholds(number).tolist()
    assert steps == sorted(steps)
    assert len(set(steps) ^ expected) <= 2  # rounding
    assert (steps[0], steps[-1]) == (0, every[-1])


def test_joined_queries_follow_each_other(queries):
    first, second = (score(Constant(), LabelledResults(*queries(n, seed=n))) for n in (20, 13))
    both = first.joined(second)
    for name in (*STORED, "match_rank", "match_score"):
        values = np.concatenate([getattr(first, name), getattr(second, name)])
        np.testing.assert_array_equal(getattr(both, name), values)
        assert getattr(both, name).dtype == getattr(first, name).dtype
    shallow = score(Constant(), LabelledResults(*queries(13, seed=1, depth=5)))
    clustered = in_population(second, clusters=np.arange(13), cluster_word="video")
    grouped = in_population(second, groups=np.array(["a"] * 13))
    for one, other, word in (
        (first, shallow, "depth"),
        (first, clustered, "clusters"),
        (clustered, first, "clusters"),
        (first, grouped, "groups"),
    ):
        with pytest.raises(InvalidData, match=word):
            one.joined(other)
    assert grouped.joined(grouped).population.groups.tolist() == ["a"] * 26
