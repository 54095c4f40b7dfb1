"""The screen: progress, an evaluation in sentences, and its tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from rich.status import Status
from rich.table import Table

from calibration.evaluation import Evaluation
from rcir.data import ImageSet
from rcir.data.bursts import MOMENT_SECONDS
from rcir.errors import as_option
from rcir.options import ALPHA
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.search import Searcher
from rcir.risk.guarantee import in_plural, stated_confidence
from rcir.terminal import console, progress_bar

if TYPE_CHECKING:
    from calibration.pipeline import Outcome
    from rcir.encoders.embedder import Embedder


UNCERTAINTY_ALONE = ("minmax", "quantile")  # score functions that use nothing but an uncertainty
NOTHING_CERTIFIED = 3  # exit status: everything was written, but no requested alpha is certified
LONG = 10.0  # seconds
SHOWN_MOMENTS = 3


def promise(evaluation: Evaluation) -> str:
    """State the guarantee in numbers, at the certified level nearest to `ALPHA`."""
    row, n = evaluation.headline, evaluation.n_calibration
    if row is None:
        confidence = stated_confidence(evaluation.rows[0].delta)
        return (
            f"Nothing is certified with probability {confidence} on {n} calibration queries: "
            f"{evaluation.refusal}."
        )
    covered, labelled = "future queries", f"{n} calibration queries"
    if kind := evaluation.cluster:
        covered = f"queries of further clusters ({kind}, each counted alike)"
        labelled += f" in {evaluation.n_clusters} clusters"
    elif evaluation.left_out:
        kinds = in_plural(evaluation.left_out)
        covered = f"{kinds} drawn from this gallery, each searched without itself,"
        labelled = f"{n} {kinds} that calibrated"
    elif evaluation.other_labels:
        covered = f"future queries with the {evaluation.other_labels} of the calibration queries"
    delta = row.delta * evaluation.chosen_among
    sentence = (
        f"With alpha = {row.alpha:g}, on average at least {100 * (1 - row.alpha):.4g} of 100 "
        f"{covered} get a set that holds a right image. The chance that this is wrong, because "
        f"the {labelled} were unluckily easy, is at most {100 * delta:.4g}%"
    )
    if evaluation.chosen_among > 1:
        sentence += (
            f", also after the choice among {evaluation.chosen_among} retrievers: each is "
            f"certified at delta = {row.delta:.4g}"
        )
    return f"{sentence}."


def cost(evaluation: Evaluation) -> str | None:
    """State set sizes and the measured risk at that level; None if it was not measured."""
    row = evaluation.headline
    if row is None or row.test_risk is None:
        return None
    alike = "no single size for all queries is certified"
    if row.constant_size is not None:
        alike = f"one size for all queries would be {row.constant_size:.4g}"
    tested, average = f"{evaluation.n_test} test queries", ""
    if evaluation.other_labels:
        tested += f" with other {evaluation.other_labels}"
    if evaluation.cluster:
        tested += f" in {evaluation.n_test_clusters} clusters"
        average = " on average over clusters"
    return (
        f"That takes {row.mean_size:.2f} images per query on average; {alike}. "
        f"Of {tested}, which neither tuned nor calibrated anything, {100 * row.test_risk:.1f}% "
        f"were missed{average} (95% interval {100 * (row.risk_low or 0):.1f}% to "
        f"{100 * (row.risk_high or 0):.1f}%)."
    )


def limit(evaluation: Evaluation) -> str:
    """State what the guarantee does not cover."""
    covered, advice = "queries drawn like the calibration queries.", ""
    if kind := evaluation.left_out:
        covered = (
            f"{in_plural(kind)} drawn from this gallery. For new ones it is an estimate: it needs "
            "the same labels in the same shares, photographed alike, and no undeclared bursts."
        )
    else:
        advice = f" ({as_option('query_labels', 'any')} does)"
    return (
        f"The promise covers {covered} It does not cover queries of labels that did not "
        f"calibrate{advice}, queries from another source, or each kind of query by itself: some "
        "kinds are missed more often than others."
    )


def size_source(evaluation: Evaluation) -> str:
    """State what sizes the sets, and what the encoder's uncertainty alone would have given."""
    score_function, name = evaluation.rows[0].score_function, evaluation.uncertainty
    if score_function == "constant":
        return "All sets have the same size: constant sizes use no uncertainty."
    source = f"the uncertainty {name!r} ({QUERY_UNCERTAINTIES[name].title})"
    if score_function not in UNCERTAINTY_ALONE:
        source = f"the candidates of each query (distances, labels, votes) and on {source}"
    sentence = f"Set sizes ({score_function}) depend on {source}"
    if evaluation.is_chance:
        sentence += ", which predicts a wrong first image no better than chance"
    levels = evaluation.uncertainties.get(name, {})
    if not levels:
        return f"{sentence}."
    alpha = min(levels, key=lambda level: abs(level - ALPHA))
    chosen = evaluation.comparison.get(score_function, {}).get(alpha)
    sentence += f". On the tuning queries, at alpha = {alpha:g}, "
    if chosen is not None:
        sentence += f"these sets hold {chosen:.2f} images; "
    sentence += f"sized by {name!r} alone they would hold {levels[alpha]:.2f}"
    by_encoder = evaluation.uncertainties.get("encoder", {}).get(alpha)
    if name != "encoder" and by_encoder is not None:
        sentence += f", and by the encoder's uncertainty alone {by_encoder:.2f}"
    ratio = evaluation.encoder_ratio
    if ratio is not None and name == "encoder":
        return (
            f"{sentence}. Beside the neighbourhood, the encoder's uncertainty makes sets "
            f"{ratio:.2f} times as large as the best other one does: it is used."
        )
    sentence += (
        ". Of the uncertainties that give nearly the smallest sets, the one is taken that best "
        "predicts a wrong first image."
    )
    if ratio is not None:
        sentence += (
            " Beside the neighbourhood, the encoder's uncertainty would make sets "
            f"{ratio:.2f} times as large: it is not used."
        )
    return sentence


def remarks(evaluation: Evaluation) -> list[str]:
    """Explain levels that are not certified, and other results that need an explanation."""
    sentences = []
    for row in evaluation.rows:
        level = f"alpha = {row.alpha:g}"
        if not row.certified and evaluation.certified:
            sentences.append(f"{level} is not certified: {row.refusal}.")
        elif row.test_risk is not None and row.test_risk > row.alpha:
            tested = f"{evaluation.n_test} test queries"
            if evaluation.cluster:
                tested = f"{evaluation.n_test_clusters} clusters of test queries"
            reason = (
                f"by more than the noise of the {tested}: this is one of the calibrations that the "
                f"guarantee allows to fail (probability {row.delta:g}), or the test queries differ "
                "from the calibration queries"
            )
            if row.risk_low is not None and row.risk_low <= row.alpha:
                reason = f"but within the noise of the {tested}"
            measured = f"the measured risk {row.test_risk:.4f} is above alpha"
            sentences.append(f"{level}: {measured}, {reason}.")
        elif row.mean_size == 1:
            sentences.append(
                f"{level}: every set holds one image, the smallest size; the risk cannot come "
                "closer to alpha."
            )
    if evaluation.labels:
        sentences.append(evaluation.labels)
    if advice := evaluation.depth_advice:
        sentences.append(f"{advice}.")
    if auroc := evaluation.quality.numbers.get("ood_auroc"):
        sentences.append(f"AUROC of out-of-distribution queries by their uncertainty: {auroc:.3f}.")
    return sentences


def print_evaluation(evaluation: Evaluation) -> None:
    """Print what was measured, then the promise, its cost and its limit."""
    print_table(evaluation)
    for sentence in (promise(evaluation), cost(evaluation), limit(evaluation)):
        if sentence is not None:
            console.print(sentence)


def print_outcome(outcome: Outcome) -> int:
    """Print a calibration, and where it is; return the exit status of the command."""
    print_evaluation(outcome.evaluation)
    print(f"retriever: {outcome.folder}\nreport: {outcome.report}")
    return NOTHING_CERTIFIED if outcome.evaluation.refusal else 0


def print_table(evaluation: Evaluation) -> None:
    """Print the measured risk and size at each level, and what sizes the sets."""
    table = Table("alpha", "certified", "measured risk", "95% interval", "mean size", "one size")
    for column in table.columns:
        column.justify = "right"
    for row in evaluation.rows:
        constant = "-" if row.constant_size is None else f"{row.constant_size:.4g}"
        cells = ["-", "-", "-"]
        if row.certified and row.test_risk is not None:
            interval = f"{row.risk_low:.4f} to {row.risk_high:.4f}"
            cells = [f"{row.test_risk:.4f}", interval, f"{row.mean_size:.2f}"]
        certified = "yes" if row.certified else "no"
        table.add_row(f"{row.alpha:g}", certified, *cells, constant)
    console.print(table)
    console.print(
        "Mean size: images per query. One size: what every query would need if all sets were "
        "equally large, of the same images in the same order."
    )
    for sentence in (*remarks(evaluation), size_source(evaluation)):
        console.print(sentence)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name what is being done, with a spinner; what is logged of an index is shown beside it.

    Without a terminal, a line of it is printed now and then.
    """
    log = logging.getLogger("rcir.index")
    with console.status(name) as status:
        handler = _Shown(name, status)
        level, propagated = log.level, log.propagate
        log.propagate = propagated and log.isEnabledFor(logging.INFO)  # to those who asked for it
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagated


def print_population(searcher: Searcher) -> None:
    """Print what queries that are gallery items leave out of their search, with three examples."""
    options, gallery = searcher.options, searcher.gallery
    units, counts = np.unique(gallery.units, return_counts=True)
    several = units[counts > 1]
    lines = ["The queries are gallery items: each is left out of its own search."]
    if options.clusters != "none":
        lines[0] = (
            f"The queries are gallery items, {len(gallery):,} in {len(units):,} "
            f"{in_plural(options.cluster)}: each is searched without its whole {options.cluster}, "
            "which counts once."
        )
    if options.clusters == "found" and len(several):
        members = gallery.members(several[:SHOWN_MOMENTS])
        pairs = [" ~ ".join(gallery.ids[row[:2]].tolist()) for row in members]
        lines.append(
            f"{counts[counts > 1].sum():,} items share a moment with others: they are far nearer "
            "to each other than to the rest of their label, or were photographed within "
            f"{MOMENT_SECONDS} s. For instance {', '.join(pairs)}. --cluster COLUMN declares "
            "clusters, and --cluster none keeps all items apart."
        )
    console.print("\n".join(lines), soft_wrap=True, highlight=False)


class _Shown(logging.Handler):
    """Shows what is logged while something is done."""

    def __init__(self, name: str, status: Status) -> None:
        super().__init__()
        self.status, self.task = status, name
        self.last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.task}: {record.getMessage()}"
        self.status.update(line)
        if not console.is_terminal and time.monotonic() - self.last > LONG:
            console.print(line, soft_wrap=True)
            self.last = time.monotonic()


@contextmanager
def embedding(name: str, images: ImageSet, embedder: Embedder) -> Iterator[Embedder]:
    """An embedder that shows how many of some images are embedded.

    Without a terminal, one line is printed if that took long.
    """
    bar = progress_bar()
    task = bar.add_task(name, total=len(images))
    n_reused = 0

    def advance(count: int, reused: bool) -> None:
        nonlocal n_reused
        n_reused += count * reused
        bar.advance(task, count)

    started = time.monotonic()
    with bar:
        yield replace(embedder, progress=advance)
    seconds = time.monotonic() - started
    if seconds > LONG and not console.is_terminal:
        before = f" ({n_reused:,} of them before)" if n_reused else ""
        line = f"{name}: {len(images):,} images embedded{before}  {seconds:.1f} s"
        console.print(line, soft_wrap=True)
