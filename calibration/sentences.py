"""An evaluation in sentences, for the screen and the report."""

from __future__ import annotations

from calibration.evaluation import MATCHABLE, Evaluation, RiskResult
from rcir.errors import as_option
from rcir.options import ALPHA
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.risk import LabelScore, guarantee
from rcir.risk.guarantee import in_plural

UNCERTAINTY_ALONE = ("minmax", "quantile")  # score functions that use nothing but an uncertainty
CHANCE = 0.55  # AUROC below which an uncertainty is called no better than chance


def promise(evaluation: Evaluation) -> str:
    """State the guarantee in numbers, at the certified level nearest to `ALPHA`."""
    row, clusters = evaluation.headline, None
    if row is None:
        delta = evaluation.rows[0].delta
        return guarantee.nothing_certified(delta, evaluation.n_calibration, evaluation.refusal)
    if evaluation.cluster is not None and evaluation.n_clusters is not None:
        clusters = evaluation.n_clusters, evaluation.cluster
    return guarantee.promise(
        row.alpha,
        evaluation.delta,
        n_calibration=evaluation.n_calibration,
        clusters=clusters,
        left_out=evaluation.left_out,
        other_labels=evaluation.other_labels,
        chosen_among=evaluation.chosen_among,
    )


def cost(evaluation: Evaluation) -> str | None:
    """State set sizes and the measured risk at that level; None if it was not measured."""
    row = evaluation.headline
    if row is None or row.test_risk is None:
        return None
    one_size = "no single size for all queries is certified"
    if row.constant_size is not None:
        one_size = f"one size for all queries would be {row.constant_size:.4g}"
    tested, average = f"{evaluation.n_test} test queries", ""
    if evaluation.other_labels:
        tested += f" with other {evaluation.other_labels}"
    if evaluation.cluster:
        tested += f" in {evaluation.n_test_clusters} clusters"
        average = " on average over clusters"
    return (
        f"That takes {row.mean_size:.2f} images per query on average; {one_size}. "
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
    elif "miss, any labels" in {row.guarantee for row in evaluation.others}:
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
    by_labels = score_function == LabelScore.name
    source = f"the uncertainty {name!r} ({QUERY_UNCERTAINTIES[name].title})"
    if by_labels:
        source = "the probabilities of the gallery's labels alone"
    elif score_function not in UNCERTAINTY_ALONE:
        source = f"the candidates of each query (distances, labels, votes) and on {source}"
    sentence = f"Set sizes ({score_function}) depend on {source}"
    if not by_labels and evaluation.quality.numbers.get("auroc_miss", 1.0) < CHANCE:
        sentence += ", which predicts a wrong first image no better than chance"
    levels = evaluation.uncertainties.get(name, {})
    if not levels:
        return f"{sentence}."
    alpha = min(levels, key=lambda level: abs(level - ALPHA))
    chosen = evaluation.comparison.get(score_function, {}).get(alpha)
    sentence += f". On the queries or gallery items that tuned them, at alpha = {alpha:g}, "
    if chosen is not None:
        sentence += f"these sets hold {chosen:.2f} images; "
    sentence += f"sized by {name!r} alone they would hold {levels[alpha]:.2f}"
    by_encoder = evaluation.uncertainties.get("encoder", {}).get(alpha)
    if name != "encoder" and by_encoder is not None:
        sentence += f", and by the encoder's uncertainty alone {by_encoder:.2f}"
    if by_labels:
        return f"{sentence}."
    return (
        f"{sentence}. Of the uncertainties that give nearly the smallest sets, the one is taken "
        "that best predicts a wrong first image."
    )


def chance_uncertainties(evaluation: Evaluation) -> list[str]:
    """Return the uncertainties that predict a wrong first image no better than chance."""
    numbers = evaluation.quality.numbers
    return [name for name in QUERY_UNCERTAINTIES if numbers.get(f"auroc_miss_{name}", 1.0) < CHANCE]


def remarks(evaluation: Evaluation) -> list[str]:
    """Explain levels that are not certified, and other results that need an explanation."""
    sentences = []
    for row in evaluation.rows:
        level = f"alpha = {row.alpha:g}"
        if not row.certified and evaluation.certified:
            sentences.append(f"{level} is not certified: {row.refusal}.")
        elif row.test_risk is not None and row.test_risk > row.alpha:
            reason = why_above(evaluation, row)
            sentences.append(
                f"{level}: the measured risk {row.test_risk:.4f} is above alpha, {reason}."
            )
        elif row.mean_size == 1:
            sentences.append(
                f"{level}: every set holds one image, the smallest size; the risk cannot come "
                "closer to alpha."
            )
    if evaluation.labels:
        sentences.append(evaluation.labels)
    sentences += _depth_advice(evaluation)
    sentences += _open_set(evaluation)
    return sentences


def why_above(evaluation: Evaluation, row: RiskResult) -> str:
    """Return the reason of a measured risk above alpha."""
    tested = f"{evaluation.n_test} test queries"
    if evaluation.cluster:
        tested = f"{evaluation.n_test_clusters} clusters of test queries"
    if row.risk_low is not None and row.risk_low <= row.alpha:
        return f"but within the noise of the {tested}"
    return (
        f"by more than the noise of the {tested}: this is one of the calibrations that the "
        f"guarantee allows to fail (probability {row.delta:g}), or the test queries differ "
        "from the calibration queries"
    )


def _open_set(evaluation: Evaluation) -> list[str]:
    """State what is certified of queries with and without a match in the gallery."""
    unknown, sentences = evaluation.open_set, []
    alone = [row for row in evaluation.others if row.guarantee == MATCHABLE and row.certified]
    if alone:
        rows = ", ".join(f"alpha = {row.alpha:g}, mean size {row.mean_size:.2f}" for row in alone)
        sentences.append(f"Certified of the queries with a match alone: {rows}.")
    if unknown is not None and unknown.trade_off:
        pairs = ", ".join(f"{row.beta:g} with {row.alpha:.3g}" for row in unknown.trade_off)
        sentences.append(
            "With a beta, all but this share of the queries without a match get no set. Certified, "
            f"each pair by itself, beta with the smallest alpha: {pairs}."
        )
    return sentences


def _depth_advice(evaluation: Evaluation) -> list[str]:
    """Return advice if many test queries have no true match among the candidates."""
    beyond, unmatched, n = evaluation.beyond_depth, evaluation.quality.unmatched, evaluation.n_test
    advice = []
    if beyond + unmatched >= min(row.alpha for row in evaluation.rows) * n / 2:
        if beyond:
            advice.append(
                f"{beyond} of {n} test queries have their true matches beyond the search depth, "
                "and are missed whatever the set size: search deeper (depth)."
            )
        if unmatched:
            advice.append(
                f"{unmatched} of {n} test queries have no true match in the gallery, and are "
                "missed whatever the depth and the set size. When you retrieve, "
                f"{as_option('beta', 0.3)}, for instance, gives such queries no set, and "
                f"{as_option('counted', 'matchable')} leaves them out."
            )
    return advice
