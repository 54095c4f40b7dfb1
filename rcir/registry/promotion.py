"""Whether a challenger has smaller certified sets than the champion.

Comparing the two on their calibration queries and keeping the better one would be a choice made
with the data that certifies, which the guarantee of neither survives (see `rcir.risk.corrected`).
They are therefore compared on the test queries alone: both are calibrated anew on one half and
measured on the other, then the other way round, with score functions fitted to the tuning split.
The comparison is independent of the calibration queries, so whichever retriever is kept keeps its
guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rcir.errors import InvalidData
from rcir.risk import Certified, corrected, is_certified, mean_size
from rcir.risk.bootstrap import Estimate, bootstrap, interval, why_no_interval
from rcir.runs.compare import DRAWS
from rcir.runs.results import RunResults


@dataclass(frozen=True)
class Contender:
    """A retriever that is compared.

    Attributes:
        name: as messages call it.
        measured: its results on its test queries.
        chosen_among: see `Calibration`.
        bound: that it was calibrated with.
    """

    name: str
    measured: RunResults
    chosen_among: int
    bound: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        accepted: whether the challenger's sets are smaller beyond noise.
        words: why, or why not, with both sizes.
    """

    accepted: bool
    words: str


def judge(challenger: Contender, champion: Contender, alpha: float, delta: float) -> Verdict:
    """Compare a challenger with the champion at one level, on the same test queries.

    Each is certified as it answers: at delta divided by what it was chosen among. The interval of
    the difference is the paired bootstrap's, see `rcir.risk.bootstrap.bootstrap`.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
    """
    both = (challenger, champion)
    deltas = [corrected(delta, one.chosen_among) for one in both]
    if reason := _incomparable(challenger, champion):
        return Verdict(False, reason)
    folds = [halves(one.measured) for one in both]
    for one, parts, level in zip(both, folds, deltas, strict=True):
        if not is_certified(parts, alpha, level):
            return Verdict(
                False,
                f"halves of the test queries certify no sets of {one.name} at alpha {alpha:g}, "
                f"delta {level:g}: compare at a larger alpha, or on more test queries",
            )
        if reason := why_no_interval(parts, alpha, level):
            return Verdict(False, f"the sizes have {reason}")
    sizes = [mean_size(parts, alpha, level) for parts, level in zip(folds, deltas, strict=True)]
    # The same seed draws the same queries for both.
    new, old = (
        bootstrap([parts], alpha, level, DRAWS)[0]
        for parts, level in zip(folds, deltas, strict=True)
    )
    difference = Estimate(sizes[0] - sizes[1], *interval(new - old))
    n = len(folds[0][0].scores) + len(folds[0][1].scores)
    words = (
        f"mean set sizes at alpha {alpha:g}, delta {delta:g} on {n} test queries, of which each "
        f"half certifies the other's: {challenger.name} {sizes[0]:.4g}, {champion.name} "
        f"{sizes[1]:.4g}, difference {difference.value:+.4g} (95% interval {difference.low:+.4g} "
        f"to {difference.high:+.4g})"
    )
    return Verdict(difference.beyond_noise and difference.value < 0, words)


def halves(measured: RunResults) -> list[Certified]:
    """The two halves of the test queries, each certified by the other, alike for every retriever.

    Raises:
        InvalidData: it is not known which thresholds serve them.
    """
    scores = measured.measured_scores
    if scores is None:
        raise InvalidData("it is not known which thresholds serve the test queries")
    (part,) = measured.parts
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = np.array_split(order, 2)
    return [
        Certified(scores[calibrating], part.candidate_scores[asking])
        for calibrating, asking in ((first, second), (second, first))
    ]


def _incomparable(challenger: Contender, champion: Contender) -> str | None:
    """Why two cannot be compared; None if they can be."""
    for one in (challenger, champion):
        if one.bound != "binomial":
            return (
                f"{one.name} was calibrated with the {one.bound} bound, and sizes are compared at "
                "the binomial one: calibrate with --bound binomial"
            )
        if not one.measured.parts:
            return (
                f"the calibration queries of {one.name} come in clusters: sizes are compared of "
                "independent queries"
            )
        if one.measured.measured_scores is None or len(one.measured.measured_scores) < 2:
            return f"{one.name} was measured by an earlier version of rcir: calibrate it again"
    if challenger.measured.measured_on != champion.measured.measured_on:
        return (
            f"{challenger.name} and {champion.name} were not measured on the same test queries, "
            "gallery and matches, so that their sizes cannot be told apart from these"
        )
    return None
