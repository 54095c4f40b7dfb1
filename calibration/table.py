"""What a calibration shows on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibration.evaluation import Evaluation

console = Console(highlight=False)


def print_table(evaluation: Evaluation) -> None:
    """Print the measured rows and what they mean."""
    first = evaluation.rows[0]
    console.print(
        f"With probability at least {1 - first.delta:.4g}, a true match is missing from at most a "
        f"fraction alpha of the sets ({first.adapter} sizes, {first.bound} bound, "
        f"{evaluation.n_calibration} calibration queries).\nMeasured on {evaluation.n_test} "
        "held-out queries:"
    )
    table = Table("alpha", "certified", "measured risk", "mean size", "constant size", "kappa")
    for column in table.columns:
        column.justify = "right"
    for row in evaluation.rows:
        constant = "-" if row.constant_size is None else str(row.constant_size)
        if row.kappa is None:
            table.add_row(f"{row.alpha:g}", "no", "-", "-", constant, "-")
        else:
            measured = (f"{row.test_risk:.4f}", f"{row.mean_size:.2f}")
            table.add_row(f"{row.alpha:g}", "yes", *measured, constant, f"{row.kappa:.4g}")
    console.print(table)
    parts = [f"recall at 1: {evaluation.recall_at_1:.3f}"]
    if evaluation.auroc_miss is not None:
        parts.append(f"AUROC of misses: {evaluation.auroc_miss:.3f}")
    if evaluation.auroc_occlusion is not None:
        parts.append(f"AUROC of occlusion: {evaluation.auroc_occlusion:.3f}")
    console.print(", ".join(parts))
