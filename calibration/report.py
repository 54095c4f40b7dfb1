"""The page of an evaluation: its figures, and the HTML that shows them with queries."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from math import log
from pathlib import Path
from platform import python_version

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, select_autoescape
from matplotlib.figure import Figure

from calibration import sentences
from calibration.evaluation import Evaluation, RiskResult
from calibration.examples import Gathered, gather
from calibration.quality import KS
from calibration.splits import SearchedSplits
from rcir import figures
from rcir.errors import printable
from rcir.retrieval.answer import UNLIKE
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.risk import LabelScore, ScoredResults, SetRule, make_request
from rcir.risk.bootstrap import Certified, Estimate, compare_sizes
from rcir.runs.results import digest_names

SHOWN_LABELS = 6
CURVE_DRAWS = 200  # of the bootstrap of each size on the curve
# Titles of `Quality.numbers`; others are shown by their names.
NUMBER_TITLES = {
    **{f"recall_at_{k}": f"R@{k}" for k in KS},
    **{f"map_at_{k}": f"mAP@{k}" for k in KS},
    "map_at_r": "MAP@R",
    "ece": "expected calibration error of R@1, 10 bins",
    "ece_item": "expected calibration error of the probabilities of items, 15 bins",
    "ece_set": "expected calibration error of the probabilities of sets, 15 bins",
    "outside_range": "share of test uncertainties outside the range of the tuning split",
    "auroc_miss": "AUROC of a wrong first image",
    "auroc_unmatched": "AUROC of queries without a match, by the estimated odds",
    **{
        f"auroc_miss_{name}": f"AUROC of a wrong first image by {kind.title}"
        for name, kind in QUERY_UNCERTAINTIES.items()
    },
    "auroc_occlusion": "AUROC of an occluded query",
    "ausc": "AUSC (query and first image)",
    "ausc_oracle": "AUSC of an oracle",
    "ausc_random": "AUSC of a random order",
}


def draw_figures(evaluation: Evaluation, splits: SearchedSplits) -> dict[str, Figure]:
    """Draw all figures, by name, in the order in which the page shows them."""
    return _draw_sizes(evaluation, splits) | _draw_uncertainty(evaluation)


def _draw_sizes(evaluation: Evaluation, splits: SearchedSplits) -> dict[str, Figure]:
    drawn = {}
    if evaluation.open_set is not None and evaluation.open_set.trade_off:
        pairs = evaluation.open_set.trade_off
        beta, alpha = (
            np.array([getattr(row, name) for row in pairs]) for name in ("beta", "alpha")
        )
        drawn["open_set"] = figures.draw_trade_off(beta, alpha)
    if evaluation.curve:
        alphas, risk, lows, highs = (
            np.array([getattr(row, name) for row in evaluation.curve], np.float64)
            for name in ("alpha", "test_risk", "risk_low", "risk_high")
        )
        drawn["risk"] = figures.draw_risk_curve(alphas, risk, lows, highs)
    sets = {
        f"alpha = {row.alpha:g}": splits.scored_test.sizes(float(row.threshold or 0))
        for row in evaluation.certified
    }
    if sets:
        drawn["sizes"] = figures.draw_size_distributions(sets)
    return drawn


def estimate_curve_sizes(
    rule: SetRule,
    test: ScoredResults,
    curve: Sequence[RiskResult],
    *,
    sequential: bool = False,
) -> list[Estimate]:
    """Return the mean set size at each level of a curve, with its bootstrap interval.

    Sizes certified by clusters of queries, for every moment (`sequential`) or by another bound than
    the binomial have no interval.
    """
    clustered = rule.evidence.population.clusters is not None
    if clustered or sequential or rule.bound != "binomial":
        return [Estimate(float(row.mean_size or 0), None, None) for row in curve]
    parts = [Certified(rule.evidence.match_score, test.require("scores"))]
    return [compare_sizes([parts], row.alpha, row.delta, CURVE_DRAWS)[0][0] for row in curve]


def _draw_uncertainty(evaluation: Evaluation) -> dict[str, Figure]:
    quality = evaluation.quality
    sparse = quality.sparsification
    curves = {
        evaluation.encoder: sparse.curve,
        "oracle": sparse.oracle_curve,
        "random": np.full(len(sparse.fractions), sparse.random),
    }
    drawn = {
        "reliability": figures.draw_reliability(quality.reliability),
        "sparsification": figures.draw_sparsification(sparse.fractions, curves),
    }
    if quality.probabilities:
        drawn["probabilities"] = figures.draw_probabilities(quality.probabilities)
    return drawn


def render(
    evaluation: Evaluation, splits: SearchedSplits, figures_by_name: Mapping[str, str]
) -> str:
    """Return the HTML page of an evaluation, which contains pictures and figures (SVG, by name)."""
    drawings = {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        for name, svg in figures_by_name.items()
    }
    calibration, gathered = splits.retriever.require_calibration(), Gathered()
    rule = calibration.miss_rule
    if (headline := evaluation.headline) is not None:
        request = make_request(headline.alpha, evaluation.delta, **calibration.required_options)
        labels = [part.name for part in evaluation.parts if part.kind == "class" and part.missed]
        gathered = gather(splits, calibration.guarantee(request), labels[:SHOWN_LABELS])
    curve_sizes = estimate_curve_sizes(
        rule, splits.scored_test, evaluation.curve, sequential=calibration.sequential
    )
    return _template().render(
        evaluation=evaluation,
        headline=headline,
        gathered=gathered,
        curve_sizes=curve_sizes,
        summary=sentences,
        titles={
            name: f"{name}: {kind.title}" if name != "encoder" else "the encoder's uncertainty"
            for name, kind in QUERY_UNCERTAINTIES.items()
        },
        delta=evaluation.rows[0].delta,
        figures=drawings,
        labelled=any("labels" in row.guarantee for row in evaluation.others),
        one_per_label=rule.score_function.name == LabelScore.name,
        depth=splits.retriever.depth,
        unlike=UNLIKE,
        numbers={
            NUMBER_TITLES.get(name, name.replace("_", " ")): value
            for name, value in evaluation.quality.numbers.items()
        },
        about={
            "Python": python_version(),
            **{name: version(name) for name in ("rcir", "numpy", "scipy", "scikit-learn")},
            **{name.replace("_", " "): value for name, value in vars(calibration.options).items()},
            **{f"digest of {name}": value for name, value in calibration.fingerprints.items()},
            "digest of calibration queries": digest_names(splits.calibration_ids),
            "digest of test queries": digest_names(splits.images.ids),
        },
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    environment.globals["log"] = log
    return environment.get_template("report.html")
