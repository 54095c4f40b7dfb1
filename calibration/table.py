"""Tables of a calibration on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibration.evaluation import Evaluation
from calibration.risk_results import RiskResult
from rcir.printable import printable
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.risk.guarantee import stated_confidence

# Names may look like markup.
console = Console(highlight=False, markup=False)

NOTHING_CERTIFIED = 3  # exit status: everything was written, but no asked alpha is certified
SHOWN_NUMBERS = {
    "recall_at_1": "recall at 1",
    "recall_at_1_pixels": "by components of pixels",
    "map_at_10": "mAP@10",
    "ausc": "AUSC",
    "ece_btl_width_at_1": "calibration error",
    "auroc_miss": "AUROC of misses",
    "auroc_occlusion": "AUROC of occlusion",
    "ood_auroc": "AUROC out of distribution",
}


def print_table(evaluation: Evaluation) -> None:
    """Print the measured rows and what they mean."""
    first = (evaluation.certified or evaluation.rows)[0]
    console.print(_stated(evaluation, first))
    table = Table("alpha", "certified", "measured risk", "mean size", "constant size", "threshold")
    for column in table.columns:
        column.justify = "right"
    for row in evaluation.rows:
        threshold = "-" if row.threshold is None else f"{row.threshold:.4g}"
        table.add_row(f"{row.alpha:g}", *_measured(row), threshold)
    console.print(table)
    if hint := evaluation.depth_advice:
        console.print(hint, soft_wrap=True)
    console.print("The same queries also certify, each guarantee by itself (-: not certified):")
    table = Table("guarantee", "alpha", "risk", "mean size", "constant", "answered")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in evaluation.others:
        _, *measured = _measured(row)
        answered = "-" if row.answered is None else f"{row.answered:.3f}"
        table.add_row(printable(row.guarantee), f"{row.alpha:g}", *measured, answered)
    console.print(table)
    if evaluation.comparison:
        console.print(
            f"Mean sizes on the tuning split, by which {first.score_function} was chosen:"
        )
        table = Table(
            "score function", *(f"alpha {alpha:g}" for alpha in evaluation.comparison["constant"])
        )
        for name, sizes in evaluation.comparison.items():
            table.add_row(name, *(f"{size:.2f}" for size in sizes.values()))
        console.print(table)
    numbers = evaluation.quality.numbers
    parts = [
        f"{title}: {numbers[name]:.3f}" for name, title in SHOWN_NUMBERS.items() if name in numbers
    ]
    console.print(", ".join(parts), soft_wrap=True)
    told = {kind: numbers.get(f"auroc_miss_{kind}") for kind in QUERY_UNCERTAINTIES}
    known = {kind: value for kind, value in told.items() if value is not None}
    if known:
        shown = ", ".join(f"{kind} {value:.3f}" for kind, value in known.items())
        chance = ", no better than chance" if evaluation.told_by_chance else ""
        console.print(
            f"Sizes go by the uncertainty {evaluation.uncertainty!r}{chance}; AUROC of a wrong "
            f"first image by each: {shown}",
            soft_wrap=True,
        )
        if evaluation.guessing:
            console.print(f"No better than chance: {', '.join(evaluation.guessing)}")


def _stated(evaluation: Evaluation, row: RiskResult) -> str:
    """The guarantee of a row, and what it was measured on."""
    sure, rule = stated_confidence(row.delta), f"{row.score_function} sizes, {row.bound} bound"
    calibrated = f"{evaluation.n_calibration} calibration queries"
    measured = f"Measured on {evaluation.n_test} held-out queries"
    if evaluation.refusal is not None:
        return (
            f"Nothing is certified with probability {sure} ({rule}, {calibrated}).\n"
            f"Of the largest alpha: {evaluation.refusal}."
        )
    missing = (
        f"With probability at least {sure}, a true match is missing from at most a fraction alpha "
        "of the sets"
    )
    if evaluation.cluster is None:
        return f"{missing} ({rule}, {calibrated}).\n{measured}:"
    kind = evaluation.cluster
    return (
        f"{missing} returned to queries of any further {kind} like the {evaluation.n_clusters} of "
        f"the {calibrated}, each {kind} counted alike ({rule}).\n{measured} of "
        f"{evaluation.n_test_clusters} others, counted likewise:"
    )


def _measured(row: RiskResult) -> tuple[str, ...]:
    constant = "-" if row.constant_size is None else f"{row.constant_size:.4g}"
    if row.threshold is None:
        return ("no", "-", "-", constant)
    if row.test_risk is None:
        return ("yes", "-", "-", constant)
    return ("yes", f"{row.test_risk:.4f}", f"{row.mean_size:.2f}", constant)
