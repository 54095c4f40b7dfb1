"""What is reported, computed again with nothing but searches, NumPy and SciPy."""

import hashlib
import json
import statistics

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

import rcir
from rcir.data import load_splits
from rcir.runs.results import RunResults

DEPTH, DELTA = 150, 0.05


@pytest.fixture(scope="module")
def searched(outcome, trained):
    """Uncertainty and first-match rank of each query of the three splits, by name."""
    retriever = rcir.load(outcome.folder)
    splits = load_splits(trained.data)
    found = {}
    for name in ("tuning", "calibration", "test"):
        queries = getattr(splits, name)
        result = retriever.search(queries.images)
        ranks = np.full(len(queries), np.inf)
        for i, label in enumerate(queries.labels):
            for rank, position in enumerate(result.positions[i], 1):
                if splits.gallery.labels[position] == label:
                    ranks[i] = rank
                    break
        found[name] = (result.uncertainty, ranks)
    return found


def scale(uncertainty, score_function):
    """The min-max scale that a fit on the uncertainties `score_function` gives."""
    low, high = score_function.min(), score_function.max()
    return np.clip((uncertainty - low) / (high - low), 1 / len(score_function), 1)


def calibrated(ranks, scales, alpha):
    """The smallest threshold that the exact binomial bound certifies, by trying all candidates."""
    for threshold in np.unique((ranks - 1) / scales):
        misses = np.sum((ranks - 1) / scales > threshold)
        if np.isfinite(threshold) and binom.cdf(misses, len(ranks), alpha) <= DELTA:
            return threshold
    return None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_row_follows_from_the_three_splits(outcome, searched, number):
    """The score function sees the tuning split alone, the controller the calibration split
    alone.
    """
    row = outcome.evaluation.rows[number]
    score_function = searched["tuning"][0]
    uncertainty, ranks = searched["calibration"]
    threshold = calibrated(ranks, scale(uncertainty, score_function), row.alpha)
    constant = calibrated(ranks, np.ones(len(ranks)), row.alpha)
    if row.alpha == 0.001:
        assert (threshold, constant) == (None, None)
        assert (row.threshold, row.test_risk, row.mean_size, row.constant_size) == (None,) * 4
        assert row.answered is None
        return
    assert row.threshold == pytest.approx(threshold, rel=1e-6)  # stored in single precision
    uncertainty, ranks = searched["test"]
    # Threshold pays for K images if it is at least the threshold that asks for them, but for a
    # thousandth.
    paid = np.arange(DEPTH) / scale(uncertainty, score_function)[:, None] <= threshold * (1 + 1e-3)
    sizes = paid.sum(axis=1)
    assert row.test_risk == np.mean(ranks > sizes)
    assert row.mean_size == pytest.approx(sizes.mean())
    assert (row.guarantee, row.answered) == ("miss", 1)
    assert row.constant_size == 1 + constant
    assert (row.delta, row.score_function, row.bound) == (DELTA, "minmax", "binomial")


def test_recall_and_aurocs_are_those_of_the_test_split(outcome, searched, trained):
    uncertainty, ranks = searched["test"]
    occluded = load_splits(trained.data).test.attributes["occluded"]
    evaluation = outcome.evaluation
    numbers = evaluation.quality.numbers
    assert numbers["recall_at_1"] == np.mean(ranks == 1)
    assert numbers["auroc_miss"] == pytest.approx(roc_auc_score(ranks > 1, uncertainty))
    assert numbers["auroc_occlusion"] == pytest.approx(roc_auc_score(occluded, uncertainty))
    assert evaluation.beyond_depth == np.isinf(ranks).sum()
    assert evaluation.quality.unmatched == 0
    assert (evaluation.n_calibration, evaluation.n_test) == (300, 300)


def test_reliability_is_scaled_by_the_tuning_split(outcome, searched):
    uncertainty, ranks = searched["test"]
    score_function = searched["tuning"][0]
    sure = 1 - np.clip((uncertainty - score_function.min()) / np.ptp(score_function), 0, 1)
    bins = np.minimum((sure * 10).astype(int), 9)
    np.testing.assert_array_equal(
        outcome.evaluation.quality.reliability.count, np.bincount(bins, minlength=10)
    )
    for number in np.unique(bins):
        expected = np.mean(ranks[bins == number] == 1)
        assert outcome.evaluation.quality.reliability.accuracy[number] == pytest.approx(expected)


def test_the_retriever_on_disk_returns_the_measured_sets(outcome, trained):
    row = outcome.evaluation.rows[1]
    test = load_splits(trained.data).test
    answers = rcir.load(outcome.folder).retrieve(list(test.images), row.alpha, row.delta)
    missed = [
        label not in set(each.labels) for each, label in zip(answers, test.labels, strict=True)
    ]
    assert np.mean(missed) == row.test_risk
    assert np.mean([each.size for each in answers]) == pytest.approx(row.mean_size)


GUARANTEES = {
    "miss, distinct labels": {"distinct": "label"},
    "miss, abstaining": {"abstain": True},
    "recall": {"risk": "recall"},
    "false discovery": {"risk": "false-discovery"},
    "miss, whatever alpha": {"simultaneous": True},
    "miss, group False": {"group": "False"},
    "miss, group True": {"group": "True"},
    "miss, any mix of groups": {"mix": "any"},
}


def test_other_guarantees_follow_from_the_answers_that_the_retriever_gives(outcome, trained):
    """Risk, size and share of answers of every guarantee, counted label by label."""
    splits = load_splits(trained.data)
    loaded, test = rcir.load(outcome.folder), splits.test
    carrying = {label: np.sum(splits.gallery.labels == label) for label in test.labels.tolist()}
    rows = iter(outcome.evaluation.others)
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
            answers = loaded.retrieve([test.images[i] for i in chosen], alpha, DELTA, **options)
            losses, sizes = [], []
            for i, answer in zip(chosen, answers, strict=True):
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
            assert row.test_risk == pytest.approx(np.mean(losses))
            assert row.mean_size == pytest.approx(np.mean(sizes))
            assert row.threshold == answers[0].guarantee.threshold
            assert row.bound == answers[0].guarantee.bound
    assert next(rows, None) is None
    assert certified >= {"miss, distinct labels", "miss, whatever alpha", "miss, group False"}
    assert certified >= {"recall", "miss, any mix of groups"}


def test_what_others_are_compared_with_follows_from_the_splits(outcome, searched, trained):
    found = RunResults.read(outcome.folder.parent / "test.safetensors")
    splits = load_splits(trained.data)
    names = [*splits.calibration.ids, *splits.test.ids]
    assert found.queries == hashlib.sha256(json.dumps(names).encode()).hexdigest()
    assert (found.on, found.score_function) == ("test", "minmax")
    score_function = searched["tuning"][0]
    uncertainty, ranks = searched["calibration"]
    (part,) = found.parts
    assert part.scores == pytest.approx((ranks - 1) / scale(uncertainty, score_function), rel=1e-6)
    prices = np.arange(DEPTH) / scale(searched["test"][0], score_function)[:, None]
    assert part.candidate_scores == pytest.approx(prices, rel=1e-6)
    for row in outcome.evaluation.rows[1:]:
        assert part.sizes(row.alpha, DELTA).mean() == pytest.approx(row.mean_size)
    logged = outcome.evaluation.metrics()
    assert {
        f"test/{name}": found.metrics[name] for name in found.metrics.keys() - {"ece"}
    } == logged
    assert found.metrics["ece"] == outcome.evaluation.quality.numbers["ece_btl_width_at_1"]


def test_what_a_group_needs_follows_from_its_calibration_queries_alone(outcome, searched, trained):
    splits = load_splits(trained.data)
    occluded = splits.calibration.attributes["occluded"]
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


def test_what_distinct_labels_need_follows_from_the_labels_found(outcome, trained):
    """The rank of the right label among the labels found, counted one by one."""
    retriever, splits = rcir.load(outcome.folder), load_splits(trained.data)
    tuning = retriever.search(splits.tuning.images).uncertainty
    found = retriever.search(splits.calibration.images)
    ranks = np.full(300, np.inf)
    for i, label in enumerate(splits.calibration.labels):
        seen = list(dict.fromkeys(splits.gallery.labels[found.positions[i]].tolist()))
        if label in seen:
            ranks[i] = 1 + seen.index(label)
    (none, *rows) = outcome.evaluation.others[:3]
    assert none.threshold is None
    for row in rows:
        threshold = calibrated(ranks, scale(found.uncertainty, tuning), row.alpha)
        assert row.threshold == pytest.approx(threshold, rel=1e-6)
        assert row.constant_size <= 1 + calibrated(ranks, np.ones(300), row.alpha)


def test_metrics_for_tracking_have_a_flat_name_for_every_statement(outcome):
    metrics = outcome.evaluation.metrics()
    rows = outcome.evaluation.rows
    assert metrics["test/alpha-0.2/threshold"] == rows[1].threshold
    assert metrics["test/alpha-0.2/answered"] == 1
    for row in outcome.evaluation.others:
        slug = row.guarantee.replace(", ", "-").replace(" ", "-")
        name = f"test/alpha-{row.alpha:g}/{slug}/test_risk"
        assert metrics.get(name) == row.test_risk
    assert all(isinstance(value, float | int) for value in metrics.values())
    # What certifies nothing has no numbers but that.
    assert {name: value for name, value in metrics.items() if "alpha-0.001" in name} == {
        f"test/alpha-0.001/divisions/{rule}/{name}": 0
        for rule in ("minmax", "constant", "1-cosine", "uncontrolled")
        for name in ("certified", "violations")
    }


def test_metrics_for_tracking_have_the_spread_over_divisions(outcome):
    metrics, repeats = outcome.evaluation.metrics(), outcome.evaluation.repeats
    for alpha in (0.2, 0.3):
        column = repeats.alphas.tolist().index(alpha)
        for rule, name in (("1 - cosine", "1-cosine"), ("minmax", "minmax")):
            place = f"test/alpha-{alpha:g}/divisions/{name}"
            risks = repeats.rules[rule].risk[:, column]
            known = risks[~np.isnan(risks)].tolist()
            assert metrics[f"{place}/certified"] == len(known) / 20
            assert metrics[f"{place}/risk"] == pytest.approx(statistics.fmean(known))
            assert metrics[f"{place}/risk_std"] == pytest.approx(statistics.pstdev(known))
            assert metrics[f"{place}/coverage"] == pytest.approx(1 - statistics.fmean(known))


def test_results_json_has_these_keys_and_the_same_numbers(outcome):
    results = json.loads((outcome.folder.parent / "results.json").read_text())
    evaluation = outcome.evaluation
    assert results.pop("seconds") > 0
    rows = results.pop("rows")
    others = results.pop("others")
    repeats = results.pop("repeats")
    assert list(repeats) == ["minmax", "constant", "1 - cosine", "uncontrolled"]
    for levels in repeats.values():
        assert list(levels) == ["0.001", *(f"{percent / 100:g}" for percent in range(2, 41, 2))]
    for rule, levels in evaluation.repeats.summary((0.001, 0.2, 0.3)).items():
        for alpha, values in levels.items():
            assert repeats[rule][alpha] == values
    parts = results.pop("parts")
    named = ("kind", "name", "n", "missed", "low", "high", "mean_size", "risk")
    assert parts == [{key: getattr(part, key) for key in named} for part in evaluation.parts]
    by_delta = results.pop("repeats_by_delta")
    assert list(by_delta) == ["0.001", "0.01", "0.05", "0.1", "0.2", "0.5"]
    assert by_delta == evaluation.repeats.summary_of_deltas()
    assert results == {
        "score_function_comparison": {},
        "dataset": "digits",
        "encoder": "btl",
        "uncertainty": "own",
        "n_calibration": 300,
        "n_test": 300,
        "beyond_depth": evaluation.beyond_depth,
        "unmatched": 0,
        "parts_alpha": 0.2,
        **dict.fromkeys(["cluster", "n_clusters", "n_test_clusters"]),
        "quality": evaluation.quality.numbers,
    }
    assert results["quality"]["recall_at_1"] == np.mean(outcome.test.ranks == 1)
    keys = (
        "guarantee",
        "alpha",
        "delta",
        "score_function",
        "bound",
        "threshold",
        "test_risk",
        "mean_size",
    )
    keys = (*keys, "constant_size", "answered", "refusal")
    assert others == [{key: getattr(row, key) for key in keys} for row in evaluation.others]
    assert rows == [{key: getattr(row, key) for key in keys} for row in evaluation.rows]
    assert rows[0]["threshold"] is None
