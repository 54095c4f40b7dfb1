"""Unknown individuals: how well they are told apart, and what certifying both error rates costs.

Three of ten labels are left out of the gallery, which holds half of what it can of the others; 30%
of the queries have these labels. Half of the queries tune and calibrate, the others measure:

- `novel_auroc`: of queries with a match, by the estimated odds; `nearest_auroc`: by the distance to
  the nearest item.
- `smallest_beta`: the smallest share of queries without a match that is certified to get a set
  together with alpha = 0.1.
- `inspections_over_fixed_k`: the mean size of sets at alpha = 0.1 and beta = 0.8, empty ones
  included, over the number of nearest labels that certifies alpha = 0.1 of the queries with a
  match; `inspections_over_one_size`: the same, with labels in the order of the sets;
  `inspections_at_smallest_beta`: over the nearest labels, with the smallest beta, where most of
  alpha is spent on queries that get no set.
- `both_violation_rate`: the share of 20 calibrations of each split whose miss rate is above alpha =
  0.2 or whose rate of accepted queries is above beta = 0.5. Calibration queries are drawn with
  replacement from all that did not tune, and these have the exact rates.
- `unlike_ks`: the largest distance of the p-values `answer.unlike` of test queries with a match
  from uniform, over the value that two samples of one distribution exceed with probability 1%.

Vectors are those of `sizes.py`; figures are means over splits.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import parser, report, sized
from recipes import Part
from scipy.stats import kstest
from sizes import DELTA, Pool, calibrated, load
from sklearn.metrics import roc_auc_score

from rcir.errors import RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    LabelledResults,
    ScoredResults,
    certify,
    make_request,
    order_statistic,
    score,
)
from rcir.risk.open_set import is_accepted, trade_off
from rcir.risk.results import widen

SETS = sized(("cub50", "omniglot", "digits"), ("digits",))
UNKNOWN, ALPHA, BETA, BETAS = 0.3, 0.1, 0.8, np.arange(0.01, 1, 0.01)
BOTH, DRAWS, MOST = make_request(0.2, DELTA, beta=0.5), sized(20, 2), 4_000  # queries


def divide(pool: Pool, seed: int) -> tuple[Part, Part, Part]:
    """Return a gallery, queries that tune and calibrate, and test queries."""
    rng = np.random.default_rng(seed)
    kinds, order = rng.permutation(np.unique(pool.labels)), rng.permutation(len(pool.labels))
    is_new = np.isin(pool.labels, kinds[: round(UNKNOWN * len(kinds))])
    items, apart = order[(pool.items & ~is_new)[order]], not (pool.items & pool.queries).any()
    by_label = items[np.argsort(pool.labels[items], kind="stable")]
    gallery = by_label if apart else by_label[::2]
    queries = order[pool.queries[order] & ~np.isin(order, gallery)]
    known = queries[~is_new[queries]][: round((1 - UNKNOWN) * MOST)]
    new = queries[is_new[queries]][: round(UNKNOWN / (1 - UNKNOWN) * len(known))]
    queries, every = rng.permutation(np.append(known, new)), Part(pool.vectors, pool.labels)
    half = len(queries) // 2
    return every[gallery], every[queries[:half]], every[queries[half:]]


def violates(queries: ScoredResults, rng: np.random.Generator) -> bool:
    """Certify both rates on a draw of half as many queries, and measure them on all."""
    try:
        certificate = certify(BOTH, queries[rng.integers(len(queries), size=len(queries) // 2)])
    except RiskUnattainable:
        return False
    assert certificate.acceptance_threshold is not None
    accepted = is_accepted(queries.require("acceptance"), certificate.acceptance_threshold)
    missed = ~accepted | (queries.match_score > widen(certificate.threshold))
    known = queries.matchable
    missed_share, accepted_share = missed[known].mean(), accepted[~known].mean()
    return bool(missed_share > BOTH.levels["miss"] or accepted_share > (BOTH.beta or 0))


def fixed_size(labelled: LabelledResults) -> float | None:
    """Return the number of nearest labels that certifies alpha for queries with a match."""
    first = labelled.first_of_each_label()
    n, depth = first.relevant.shape
    scores = np.tile(np.arange(1, depth + 1, dtype=np.float32), (n, 1))
    try:
        return order_statistic(
            ALPHA, DELTA, ScoredResults.from_scores(scores, first.relevant)[first.n_relevant > 0]
        ).threshold
    except RiskUnattainable:
        return None


def inspections(retriever: Retriever, test: Part, beta: float) -> float | None:
    """Return the mean size of sets; None if the request is refused."""
    try:
        answers = retriever.retrieve(test.vectors, ALPHA, DELTA, beta=beta)
    except RiskUnattainable:
        return None
    return float(np.mean([answer.size for answer in answers]))


def measured(pool: Pool, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the figures of one split."""
    gallery, labelled, test = divide(pool, seed)
    retriever = calibrated(gallery, labelled)
    calibration, searcher = retriever.require_calibration(), retriever.searcher
    rule = calibration.miss_rule
    found = searcher.search_labelled(searcher.labelled(test.vectors, test.labels)[0])
    arranged = calibration.arrange(searcher, found, rule)
    scored = score(rule.score_function, arranged)
    known = scored.matchable
    yield "novel_auroc", roc_auc_score(known, scored.require("acceptance"))
    yield "nearest_auroc", roc_auc_score(known, -found.results.require("distances")[:, 0])
    p, m = arranged.results.require("unlike")[known], len(calibration.likeness.nearness)
    critical = 1.63 * np.sqrt(1 / m + 1 / len(p))
    yield "unlike_ks", kstest(p, "uniform").statistic / critical
    pairs = trade_off(make_request(ALPHA, DELTA, beta=0.5), BETAS.tolist(), rule.evidence)
    beta = min(
        (beta for beta, alpha in pairs if alpha is not None and alpha <= ALPHA), default=None
    )
    fixed = fixed_size(searcher.search_labelled(calibration.queries_to_search(searcher)[1]))
    one = rule.constant_size(make_request(ALPHA, DELTA, counted="matchable"), scored)
    size = inspections(retriever, test, BETA)
    if beta is not None and fixed is not None:
        yield "smallest_beta", beta
        yield "inspections_at_smallest_beta", inspections(retriever, test, beta) / fixed
    if size is not None and fixed is not None and one is not None:
        yield "inspections_over_fixed_k", size / fixed
        yield "inspections_over_one_size", size / one
    rng, queries = np.random.default_rng(seed), rule.evidence.joined(scored)
    yield "both_violation_rate", np.mean([violates(queries, rng) for _ in range(DRAWS)])


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--embedded", type=Path, help="where vectors are, or go to")
    command.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    command.add_argument("--splits", type=int, default=sized(10, 1))
    options = command.parse_args()
    warnings.simplefilter("ignore")  # of queries without a match
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.sets:
            pool, values = load(name, options.embedded or Path(temporary)), defaultdict(list)
            for seed in range(options.splits):
                for figure, value in measured(pool, seed):
                    values[figure].append(float(value))
            for figure, numbers in values.items():
                figures[f"{name}_{figure}"] = float(np.mean(numbers))
                ends = f"{min(numbers):.3f} to {max(numbers):.3f}"
                rows.append(
                    [f"{name}, {figure}", f"{np.mean(numbers):.3f}", ends, str(len(numbers))]
                )
    columns = ("figure", "mean", "range", "splits")
    report(f"30% of queries without a match, delta {DELTA}", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
