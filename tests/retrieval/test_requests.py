"""Statements other than plain misses: what is asked and what is answered."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from rcir.retrieval.retriever import Retriever

DELTA = 0.1


@pytest.fixture(scope="module")
def learned(retriever, splits):
    """The same gallery, with a score function that can tell who is worth answering."""
    built = Retriever(
        retriever.encoder,
        retriever.preprocessing,
        retriever.index,
        splits.gallery.ids,
        splits.gallery.labels,
        150,
        np.array(retriever.item_uncertainty),
    )
    built.calibrate(
        built.search_labelled(splits.tuning), built.search_labelled(splits.calibration), "learned"
    )
    return built


@pytest.fixture(scope="module")
def facts(retriever, splits):
    """Of the calibration queries: scale by the tuning split's quantiles, and who is right."""
    sample = retriever.search(splits.tuning.images).uncertainty
    found = retriever.search(splits.calibration.images)
    # Of the sample counts what is up to a thousandth above, which rounding may do to a picture.
    scale = np.array([max(1, np.sum(sample <= 1.001 * u)) / 200 for u in found.uncertainty])
    labels = splits.gallery.labels[found.positions]
    relevant = labels == splits.calibration.labels[:, None]
    totals = np.array([np.sum(splits.gallery.labels == x) for x in splits.calibration.labels])
    return scale, relevant, totals, labels


def held(scale, threshold, depth=150, tolerance=1e-3):
    """(n, depth) whether a rank is in the set that threshold pays for, a thousandth more
    allowed.
    """
    return np.arange(depth) / scale[:, None] <= threshold * (1 + tolerance)


def miss_threshold(ranks, scale, certified):
    """The smallest threshold whose number of misses is certified, by trying all of them."""
    prices = (ranks - 1) / scale
    for threshold in np.unique(prices):
        if np.isfinite(threshold) and certified(np.sum(prices > threshold)):
            return threshold
    return None


def first_ranks(relevant):
    return np.where(relevant.any(1), relevant.argmax(1) + 1.0, np.inf)


def distinct_ranks(labels, truth):
    """Rank of the right label among the labels found, one by one."""
    ranks = []
    for row, label in zip(labels.tolist(), truth.tolist(), strict=True):
        seen = list(dict.fromkeys(row))
        ranks.append(1 + seen.index(label) if label in seen else np.inf)
    return np.array(ranks)


def test_a_set_of_distinct_labels_holds_the_nearest_item_of_each(retriever, splits):
    queries = splits.test.images[:20]
    preprocessed = [
        retriever.encoder.embed(retriever.preprocessing(images)).vectors.double().numpy()
        for images in (splits.gallery.images, queries)
    ]
    names = list(splits.gallery.ids)
    sizes = set()
    for row, answer in enumerate(retriever.retrieve(list(queries), 0.3, DELTA, distinct="label")):
        distances = np.linalg.norm(preprocessed[0] - preprocessed[1][row], axis=1)
        nearest = {}
        for position in distances.argsort(kind="stable"):
            nearest.setdefault(splits.gallery.labels[position], distances[position])
        expected = sorted(nearest.items(), key=lambda pair: pair[1])[: answer.size]
        assert len(set(answer.labels)) == answer.size
        assert list(answer.labels) == [label for label, _ in expected]
        rows = [names.index(name) for name in answer.ids]
        assert splits.gallery.labels[rows].tolist() == list(answer.labels)
        np.testing.assert_allclose(distances[rows], [distance for _, distance in expected])
        np.testing.assert_allclose(answer.distances, distances[rows], atol=1e-5)
        sizes.add(answer.size)
    assert len(sizes) > 3


def test_distinct_labels_are_certified_by_the_ranks_of_labels(retriever, splits, facts):
    scale, _, _, labels = facts
    ranks = distinct_ranks(labels, splits.calibration.labels)
    threshold = miss_threshold(ranks, scale, lambda misses: binom.cdf(misses, 400, 0.3) <= DELTA)
    guarantee = retriever.retrieve(splits.test.images[0], 0.3, DELTA, distinct="label").guarantee
    assert guarantee.threshold == pytest.approx(threshold, rel=1e-6)
    assert guarantee.distinct == "label"


def test_a_set_never_asks_for_more_labels_than_were_found(retriever, splits):
    answers = retriever.retrieve(list(splits.test.images), 0.06, DELTA, distinct="label")
    found = retriever.search(splits.test.images)
    most = [len(set(row.tolist())) for row in splits.gallery.labels[found.positions]]
    assert all(answer.size <= limit for answer, limit in zip(answers, most, strict=True))
    assert any(answer.size == limit for answer, limit in zip(answers, most, strict=True))
    assert all(np.isfinite(answer.distances).all() for answer in answers)


def hoeffding_bentkus(losses, alpha):
    n, mean = len(losses), np.mean(losses)
    if mean >= alpha:
        return 1.0
    kl = mean * math.log(mean / alpha) + (1 - mean) * math.log((1 - mean) / (1 - alpha))
    tail = binom.cdf(math.ceil(round(float(np.sum(losses)), 9)), n, alpha)
    return min(math.exp(-n * kl), math.e * tail)


@pytest.mark.parametrize("alpha", [0.4, 0.7, 0.95])
def test_recall_is_certified_with_the_smallest_threshold_that_can_be(
    retriever, splits, facts, alpha
):
    """Shares of missing matches by counting; certified there, and not one match earlier."""
    scale, relevant, totals, _ = facts

    def p_value(threshold):  # which does not count on the tolerance; 1e-6 is for single precision
        hits = (held(scale, threshold, tolerance=1e-6) & relevant).sum(axis=1)
        return hoeffding_bentkus(1 - hits / totals, alpha)

    prices = np.unique((np.arange(150) / scale[:, None])[relevant])
    answer = retriever.retrieve(splits.test.images[0], alpha, DELTA, risk="recall")
    place = np.argmin(np.abs(prices - answer.guarantee.threshold))
    assert prices[place] == pytest.approx(answer.guarantee.threshold, rel=1e-6)
    assert p_value(prices[place]) <= DELTA < p_value(prices[place - 1])
    assert answer.guarantee.risk == "recall"
    assert answer.guarantee.bound == "hoeffding-bentkus"
    assert answer.guarantee.risk_bound == alpha


@pytest.mark.parametrize(
    ("alpha", "names"),
    [
        (0.9, ("false-discovery",)),
        ({"miss": 0.6, "false-discovery": 0.9}, ("miss", "false-discovery")),
        ({"miss": 0.4, "recall": 0.9}, ("miss", "recall")),
        ({"miss": 0.6, "recall": 0.95, "false-discovery": 0.95},) * 2,
    ],
    ids=str,
)
def test_every_risk_asked_for_is_refuted_by_the_calibration_queries(
    retriever, splits, facts, alpha, names
):
    scale, relevant, totals, _ = facts
    several = isinstance(alpha, dict)
    options = {} if several else {"risk": "false-discovery"}
    guarantee = retriever.retrieve(splits.test.images[0], alpha, DELTA, **options).guarantee
    sets = held(scale, guarantee.threshold)
    hits = (sets & relevant).sum(axis=1)
    losses = {
        "miss": hits == 0,
        "recall": 1 - hits / totals,
        "false-discovery": 1 - hits / sets.sum(axis=1),
    }
    for risk in names:
        level = alpha[risk] if several else alpha
        if risk == "miss":
            assert binom.cdf(losses["miss"].sum(), 400, level) <= DELTA
        else:
            assert hoeffding_bentkus(losses[risk], level) <= DELTA
    assert guarantee.alpha == alpha
    assert guarantee.risk == ", ".join(names)
    assert guarantee.risk_bound == (None if several else alpha)


def test_one_candidate_or_none_is_returned_where_abstaining_is_allowed(learned, splits):
    images = list(splits.test.images)
    answers = learned.retrieve(images, 0.5, DELTA, abstain=True)
    assert {answer.size for answer in answers} == {0, 1}
    nearest = learned.search(splits.test.images).positions[:, 0]
    for answer, position in zip(answers, nearest, strict=True):
        assert answer.abstained == (answer.size == 0)
        assert answer.ids == (() if answer.abstained else (splits.gallery.ids[position],))
        assert str(answer).splitlines()[0] == (
            f"no answer: too uncertain, uncertainty {answer.uncertainty:.4g}"
            if answer.abstained
            else f"1 image, uncertainty {answer.uncertainty:.4g}"
        )
        assert answer.to_dict()["abstained"] == answer.abstained
        assert answer.guarantee.abstain


def test_answers_given_are_wrong_no_more_often_than_the_binomial_bound_allows(learned, splits):
    answers = learned.retrieve(list(splits.calibration.images), 0.5, DELTA, abstain=True)
    wrong = [
        answer.labels[0] != label
        for answer, label in zip(answers, splits.calibration.labels, strict=True)
        if not answer.abstained
    ]
    assert binom.cdf(sum(wrong), len(wrong), 0.5) <= DELTA
    assert 50 < len(wrong) < 350
    # All of them answered, they would not be.
    nearest = splits.gallery.labels[learned.search(splits.calibration.images).positions[:, 0]]
    assert binom.cdf(np.sum(nearest != splits.calibration.labels), 400, 0.5) > DELTA


def test_who_is_answered_at_less_risk_is_answered_at_more(learned, splits):
    images = list(splits.test.images)
    few, many = (
        [not answer.abstained for answer in learned.retrieve(images, alpha, DELTA, abstain=True)]
        for alpha in (0.5, 0.6)
    )
    assert np.all(np.array(many) >= few)
    assert sum(many) > sum(few)


@pytest.mark.parametrize("group", ["True", "False"])
def test_a_group_is_sized_by_its_own_calibration_queries(retriever, splits, facts, group):
    scale, relevant, _, _ = facts
    rows = splits.calibration.attributes["occluded"] == (group == "True")
    n = int(rows.sum())
    threshold = miss_threshold(
        first_ranks(relevant)[rows],
        scale[rows],
        lambda misses: binom.cdf(misses, n, 0.3) <= DELTA,
    )
    guarantee = retriever.retrieve(splits.test.images[0], 0.3, DELTA, group=group).guarantee
    assert guarantee.threshold == pytest.approx(threshold, rel=1e-6)
    assert (guarantee.group, guarantee.n_calibration) == (group, n)


def group_thresholds(splits, facts, alpha, delta):
    """What each group needs by its own calibration queries."""
    scale, relevant, _, _ = facts
    occluded = splits.calibration.attributes["occluded"] == 1
    thresholds = []
    for rows in (occluded, ~occluded):
        n = int(rows.sum())
        ranks = first_ranks(relevant)[rows]
        thresholds.append(
            miss_threshold(
                ranks, scale[rows], lambda misses, n=n: binom.cdf(misses, n, alpha) <= delta
            )
        )
    return thresholds


def test_any_mix_of_groups_gets_what_the_neediest_group_needs(retriever, splits, facts):
    guarantee = retriever.retrieve(splits.test.images[0], 0.4, DELTA, mix="any").guarantee
    expected = max(group_thresholds(splits, facts, 0.4, DELTA / 2))
    assert guarantee.threshold == pytest.approx(expected, rel=1e-6)
    assert (guarantee.mix, guarantee.n_groups, guarantee.n_calibration) == ("any", 2, 400)
    assert guarantee.risk_bound <= 0.4
    assert str(guarantee) == (
        "With probability at least 0.9, whatever the mix of the 2 groups, a true match is missing "
        "from at most 0.4 of the sets returned to queries like the 400 calibration queries "
        f"(quantile sizes, binomial bound, threshold = {guarantee.threshold:.4g})."
    )


def test_a_mix_of_groups_needs_the_more_the_more_hard_queries_it_has(retriever, splits, facts):
    scale, relevant, _, _ = facts
    occluded = splits.calibration.attributes["occluded"] == 1
    prices = np.where(relevant.any(1), relevant.argmax(1) / scale, np.inf)
    thresholds = []
    for share in (0.1, 0.5, 0.9):
        mix = {"True": share, "False": 1 - share}
        guarantee = retriever.retrieve(splits.test.images[0], 0.4, DELTA, mix=mix).guarantee
        missed = prices > guarantee.threshold * (1 + 1e-3)
        weighted = share * missed[occluded].mean() + (1 - share) * missed[~occluded].mean()
        # Less than alpha, as a certificate needs; not by far.
        assert 0.25 < weighted < 0.4
        assert (guarantee.mix, guarantee.bound) == (mix, "betting")
        thresholds.append(guarantee.threshold)
    assert thresholds == sorted(set(thresholds))


def test_the_sentence_of_a_mix_names_its_shares(retriever, splits):
    mix = {"True": 0.25, "False": 0.75}
    guarantee = retriever.retrieve(splits.test.images[0], 0.4, DELTA, mix=mix).guarantee
    assert str(guarantee) == (
        "With probability at least 0.9, where the groups come as True 0.25, False 0.75, a true "
        "match is missing from at most 0.4 of the sets returned to queries like the 400 "
        f"calibration queries (quantile sizes, betting bound, "
        f"threshold = {guarantee.threshold:.4g})."
    )
    recall = retriever.retrieve(splits.test.images[0], 0.9, DELTA, mix=mix, risk="recall")
    assert "come as True 0.25, False 0.75, at most 0.9 of a query's true matches" in str(
        recall.guarantee
    )


def test_recall_of_distinct_labels_is_of_labels(retriever, splits):
    answer = retriever.retrieve(splits.test.images[0], 0.6, DELTA, distinct="label", risk="recall")
    assert str(answer.guarantee) == (
        "With probability at least 0.9, at most 0.6 of a query's true labels, on average over "
        "queries, are missing from the sets of distinct labels returned to queries like the 400 "
        "calibration queries (quantile sizes, hoeffding-bentkus bound, "
        f"threshold = {answer.guarantee.threshold:.4g})."
    )


def test_levels_that_hold_at_once_rest_on_a_band(retriever, splits, facts, naive_local_level):
    scale, relevant, _, _ = facts
    level = naive_local_level(400, DELTA)
    plain = retriever.retrieve(splits.test.images[0], 0.3, DELTA).guarantee
    for alpha in (0.2, 0.3, 0.5):
        threshold = miss_threshold(
            first_ranks(relevant),
            scale,
            lambda misses, alpha=alpha: binom.cdf(misses, 400, alpha) <= level,
        )
        guarantee = retriever.retrieve(
            splits.test.images[0], alpha, DELTA, simultaneous=True
        ).guarantee
        assert guarantee.threshold == pytest.approx(threshold, rel=1e-6)
        assert (guarantee.bound, guarantee.simultaneous) == ("band", True)
        assert guarantee.risk_bound <= alpha
        assert guarantee.alpha != 0.3 or guarantee.threshold > plain.threshold


def test_without_delta_the_risk_is_bounded_on_average(retriever, splits, facts):
    scale, relevant, totals, _ = facts
    guarantee = retriever.retrieve(splits.test.images[0], 0.3, None).guarantee
    threshold = miss_threshold(
        first_ranks(relevant), scale, lambda misses: (misses + 1) / 401 <= 0.3
    )
    assert guarantee.threshold == pytest.approx(threshold, rel=1e-6)
    assert (guarantee.delta, guarantee.bound) == (None, "conformal")
    prices = np.unique((np.arange(150) / scale[:, None])[relevant])
    recall = retriever.retrieve(splits.test.images[0], 0.6, None, risk="recall").guarantee
    place = np.argmin(np.abs(prices - recall.threshold))
    bounds = [
        (np.sum(1 - (held(scale, threshold) & relevant).sum(axis=1) / totals) + 1) / 401
        for threshold in prices[[place - 1, place]]
    ]
    assert bounds[1] <= 0.6 < bounds[0]


def test_options_are_combined(learned, splits):
    image = splits.test.images[0]
    answer = learned.retrieve(image, 0.5, None, distinct="label", risk="recall")
    assert len(set(answer.labels)) == answer.size
    sentence = str(answer.guarantee)
    assert sentence.startswith(
        "On average over calibrations, of which one that certifies nothing counts as none wrong, "
        "at most 0.5 of a query's true labels, on average over queries, "
    )
    assert "are missing from the sets of distinct labels returned to queries" in sentence
    assert {each.size for each in learned.retrieve([image] * 2, 0.6, DELTA, abstain=True)} <= {0, 1}


@pytest.mark.parametrize(
    ("alpha", "options"),
    [(0.3, {}), (0.3, {"distinct": "label"}), (0.8, {"abstain": True}), (0.5, {"risk": "recall"})],
)
def test_queries_in_blocks_are_answered_as_one_by_one(
    retriever, splits, monkeypatch, alpha, options
):
    images = list(splits.test.images[:30])
    together = retriever.retrieve(images, alpha, 0.1, **options)
    monkeypatch.setattr("rcir.retrieval.retriever.TOGETHER", 7)
    in_blocks = retriever.retrieve(images, alpha, 0.1, **options)
    assert [one.to_dict() for one in in_blocks] == [one.to_dict() for one in together]
    for image, expected in zip(images[::6], together[::6], strict=True):
        assert retriever.retrieve(image, alpha, 0.1, **options).ids == expected.ids
