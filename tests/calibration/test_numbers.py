"""Reported numbers, computed again with nothing but searches, NumPy and SciPy."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, binomtest
from sklearn.metrics import roc_auc_score

import rcir
from calibration.measure import CURVE_ALPHAS
from calibration.report import estimate_curve_sizes
from rcir.runs.results import RunResults

DEPTH, DELTA = 150, 0.05


def ranks_of(labels, found):
    """The rank of the first label of each row that is the query's, from 1; infinite if none is."""
    ranks = np.full(len(labels), np.inf)
    for row, label in enumerate(labels.tolist()):
        if label in found[row]:
            ranks[row] = 1 + found[row].index(label)
    return ranks


@pytest.fixture(scope="module")
def searched(outcome):
    """Uncertainty and first-match rank of each query of the three splits, by name."""
    retriever, splits = rcir.load(outcome.folder), outcome.splits.data
    values = {}
    for name in ("tuning", "calibration", "test"):
        queries = getattr(splits, name)
        results = retriever.search(queries.images)
        labels = splits.gallery.labels[results.positions].tolist()
        values[name] = results.uncertainty, ranks_of(queries.labels, labels)
    return values


def scale(uncertainty, tuning):
    """The min-max scale that a fit on the tuning uncertainties gives."""
    low, high = tuning.min(), tuning.max()
    return np.clip((uncertainty - low) / (high - low), 1 / len(tuning), 1)


def calibrated(ranks, scales, alpha):
    """The smallest threshold that the exact binomial bound certifies, by trying all candidates."""
    for threshold in np.unique((ranks - 1) / scales):
        misses = np.sum((ranks - 1) / scales > threshold)
        if np.isfinite(threshold) and binom.cdf(misses, len(ranks), alpha) <= DELTA:
            return threshold
    return None


def test_every_row_follows_from_the_three_splits(outcome, searched):
    """The score function is fitted on the tuning split, the controller on the calibration split."""
    tuning, (uncertainty, ranks) = searched["tuning"][0], searched["calibration"]
    test_uncertainty, test_ranks = searched["test"]
    refused, *certified = outcome.evaluation.rows
    assert calibrated(ranks, np.ones(300), 0.001) is None
    values = (refused.threshold, refused.test_risk, refused.mean_size, refused.constant_size)
    assert (*values, refused.risk_low, refused.risk_high, refused.answered) == (None,) * 7
    for row in certified:
        threshold = calibrated(ranks, scale(uncertainty, tuning), row.alpha)
        assert row.threshold == pytest.approx(threshold, rel=1e-6)  # stored in single precision
        # A set holds the candidates whose scores exceed the threshold by a thousandth at most.
        scores = np.arange(DEPTH) / scale(test_uncertainty, tuning)[:, None]
        sizes = (scores <= threshold * (1 + 1e-3)).sum(axis=1)
        missed = test_ranks > sizes
        assert row.test_risk == np.mean(missed)
        interval = binomtest(int(missed.sum()), len(missed)).proportion_ci(method="exact")
        assert (row.risk_low, row.risk_high) == pytest.approx(tuple(interval))
        assert row.mean_size == pytest.approx(sizes.mean())
        assert (row.guarantee, row.answered) == ("miss", 1)
        assert row.constant_size == 1 + calibrated(ranks, np.ones(300), row.alpha)
        assert (row.delta, row.score_function, row.bound) == (DELTA, "minmax", "binomial")


def test_the_curve_has_the_rows_and_sizes_of_more_levels(outcome):
    evaluation = outcome.evaluation
    levels = [row.alpha for row in evaluation.curve]
    assert levels == sorted({*levels, 0.2, 0.3})
    assert set(np.round(np.arange(0.06, 0.401, 0.02), 2)) <= set(levels) < {*CURVE_ALPHAS, 0.3}
    assert [row for row in evaluation.curve if row.alpha in (0.2, 0.3)] == evaluation.certified
    rule, test = outcome.retriever.calibration.miss_rule, outcome.splits.scored_test
    sizes = dict(zip(levels, estimate_curve_sizes(rule, test, evaluation.curve), strict=True))
    for row in evaluation.curve:
        size = sizes[row.alpha]
        assert size.value == pytest.approx(row.mean_size)
        assert size.low < size.value < size.high
    (estimate,) = estimate_curve_sizes(replace(rule, bound="hoeffding"), test, evaluation.curve[:1])
    assert (estimate.value, estimate.low) == (evaluation.curve[0].mean_size, None)


def test_quality_is_that_of_the_test_split(outcome, searched):
    """Check which queries are measured; `test_quality.py` checks each number."""
    uncertainty, ranks = searched["test"]
    images, evaluation = outcome.splits.data.test, outcome.evaluation
    numbers = evaluation.quality.numbers
    assert numbers["recall_at_1"] == np.mean(ranks == 1)
    assert numbers["auroc_miss"] == pytest.approx(roc_auc_score(ranks > 1, uncertainty))
    occluded = roc_auc_score(images.attributes["occluded"], uncertainty)
    assert numbers["auroc_occlusion"] == pytest.approx(occluded)
    assert evaluation.beyond_depth == np.isinf(ranks).sum()
    assert evaluation.quality.unmatched == 0
    assert (evaluation.n_calibration, evaluation.n_test) == (300, 300)


GUARANTEES = {
    "miss": {},
    "miss, distinct labels": {"distinct": "label"},
    "miss, abstaining": {"abstain": True},
    "recall": {"risk": "recall"},
    "false discovery": {"risk": "false-discovery"},
    "miss, whatever alpha": {"simultaneous": True},
    "miss, group False": {"group": "False"},
    "miss, group True": {"group": "True"},
    "miss, any mix of groups": {"mix": "any"},
    "miss, each quarter of the uncertainty": {"balance": "uncertainty"},
    "miss, new labels": {"query_labels": "new"},
    "miss, any labels": {"query_labels": "any"},
}


def test_every_guarantee_is_measured_on_what_the_retriever_on_disk_returns(outcome):
    """Risk, size and share of answers of every guarantee, counted label by label."""
    splits = outcome.splits.data
    loaded, test = rcir.load(outcome.folder), splits.test
    carrying = {label: np.sum(splits.gallery.labels == label) for label in test.labels.tolist()}
    rows = iter([*outcome.evaluation.rows, *outcome.evaluation.others])
    certified = set()
    for guarantee, options in GUARANTEES.items():
        group = options.get("group")
        groups = test.attributes["occluded"].astype(str)
        chosen = [row for row in range(len(test)) if group in (None, groups[row])]
        for alpha in (0.001, 0.2, 0.3):
            row = next(rows)
            assert (row.guarantee, row.alpha, row.delta) == (guarantee, alpha, DELTA)
            if row.threshold is None:
                with pytest.raises(rcir.RiskUnattainable):
                    loaded.retrieve(test.images[0], alpha, DELTA, **options)
                assert (row.test_risk, row.mean_size, row.answered) == (None, None, None)
                continue
            certified.add(guarantee)
            # All images, as the evaluation: in another batch, equally near candidates may swap.
            answers = loaded.retrieve(list(test.images), alpha, DELTA, **options)
            losses, sizes = [], []
            for i in chosen:
                answer = answers[i]
                if answer.size:
                    hits = answer.labels.count(test.labels[i])
                    total = carrying[test.labels[i]]
                    sizes.append(answer.size)
                    losses.append(
                        {
                            "recall": 1 - hits / max(total, 1),
                            "false discovery": 1 - hits / answer.size,
                        }.get(guarantee, float(hits == 0))
                    )
            assert row.answered == pytest.approx(len(sizes) / len(chosen))
            if guarantee == "miss, new labels":  # each label counts the same
                labels = test.labels
                losses = [np.mean(np.array(losses)[labels == one]) for one in np.unique(labels)]
            if "quarter" in guarantee:  # the largest risk
                cuts = answers[0].guarantee.certificate.cuts
                bins = np.searchsorted(cuts, [answers[i].uncertainty for i in chosen])
                losses = max((np.array(losses)[bins == b] for b in np.unique(bins)), key=np.mean)
            assert row.test_risk == pytest.approx(np.mean(losses))
            assert row.mean_size == pytest.approx(np.mean(sizes))
            assert row.threshold == answers[0].guarantee.threshold
            assert row.bound == answers[0].guarantee.bound
    assert next(rows, None) is None
    assert certified >= {"miss, distinct labels", "miss, whatever alpha", "miss, group False"}
    assert certified >= {"recall", "miss, any mix of groups"}


def test_what_others_are_compared_with_follows_from_the_splits(outcome, searched):
    found = RunResults.read(outcome.folder.parent / "test.safetensors")
    splits = outcome.splits.data
    names = [*splits.calibration.ids, *splits.test.ids]
    assert found.queries == hashlib.sha256(json.dumps(names).encode()).hexdigest()
    assert (found.on, found.score_function) == ("test", "minmax")
    tuning_uncertainty = searched["tuning"][0]
    uncertainty, ranks = searched["calibration"]
    (part,) = found.parts
    scores = (ranks - 1) / scale(uncertainty, tuning_uncertainty)
    assert part.scores == pytest.approx(scores, rel=1e-6)
    candidate_scores = np.arange(DEPTH) / scale(searched["test"][0], tuning_uncertainty)[:, None]
    assert part.candidate_scores == pytest.approx(candidate_scores, rel=1e-6)
    for row in outcome.evaluation.rows[1:]:
        assert part.sizes(row.alpha, DELTA).mean() == pytest.approx(row.mean_size)
    assert found.metrics == outcome.evaluation.quality.numbers


def test_what_a_group_needs_follows_from_its_calibration_queries_alone(outcome, searched):
    occluded = outcome.splits.data.calibration.attributes["occluded"]
    uncertainty, ranks = searched["calibration"]
    for row in outcome.evaluation.others:
        if not row.guarantee.startswith("miss, group"):
            continue
        rows = occluded == (row.guarantee == "miss, group True")
        threshold = calibrated(
            ranks[rows], scale(uncertainty, searched["tuning"][0])[rows], row.alpha
        )
        constant = calibrated(ranks[rows], np.ones(rows.sum()), row.alpha)
        assert row.threshold == (None if threshold is None else pytest.approx(threshold, rel=1e-6))
        assert row.constant_size == (None if constant is None else 1 + constant)


def test_results_json_has_the_same_numbers(outcome):
    results = json.loads((outcome.folder.parent / "results.json").read_text())
    evaluation = outcome.evaluation
    for name, rows in (("rows", evaluation.rows), ("others", evaluation.others)):
        assert results[name] == [vars(row) for row in rows]
    assert results["parts"] == [vars(part) | {"risk": part.risk} for part in evaluation.parts]
    assert results["quality"] == evaluation.quality.numbers
    for name in ("n_calibration", "n_test", "beyond_depth", "parts_alpha", "uncertainty"):
        assert results[name] == getattr(evaluation, name)
    assert (results["dataset"], results["encoder"], results["unmatched"]) == ("digits", "btl", 0)
    assert results["seconds"] > 0
