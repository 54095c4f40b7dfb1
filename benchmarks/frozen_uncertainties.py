"""Comparison of uncertainties by how well they predict a wrong nearest image.

The features of birds are those of a network pre-trained on ImageNet (`cub.py`). Over random halves,
it reports the AUROC of a wrong first image, and the certified mean set size of each uncertainty
alone (`Quantile` sizes), divided by that of constant sizes. Uncertainties of retrievers come first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from common import parser, report, sized
from cub import birds, gallery_and_queries
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import rcir
from rcir.errors import RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    Learned,
    Quantile,
    Request,
    SetRule,
    score,
)

HALVES = sized(10, 2)
ALPHA, DELTA = sized(0.1, 0.4), 0.1
SHARES = (0.3, 0.7)  # the ends of the tuning and the calibration queries


def uncertainties(
    retriever: rcir.Retriever, gallery: np.ndarray, labelled: LabelledResults, tuning: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and the values (n,) of all uncertainties.

    Args:
        retriever: the retriever.
        gallery: (n, d) vectors of its gallery.
        labelled: search results of all queries.
        tuning: rows to fit on.
    """
    for kind in retriever.searcher.uncertainties[1:]:
        yield kind, retriever.searcher.judged(labelled, kind).results.uncertainty
    results = labelled.results
    distances, labels = results.require("distances"), results.require("labels")
    same = labels == labels[:, :1]
    yield "vote of 10", 1 - same[:, :10].mean(axis=1)
    squared = distances[:, :30] ** 2
    for temperature in (0.02, 0.1):
        weight = np.exp((squared[:, :1] - squared) / temperature)
        share = (weight * same[:, :30]).sum(axis=1) / weight.sum(axis=1)
        yield f"vote of 30, weighted by exp(-d^2 / {temperature:g})", 1 - share
    other = np.where(same, np.inf, distances).min(axis=1)
    yield "gap to the nearest of another label", distances[:, 0] - other
    yield "density: mean distance of 10", distances[:, :10].mean(axis=1)
    vectors, wrong = results.require("vectors"), ~labelled.relevant[:, 0]
    yield "Laplace: variance of a linear last layer, prior 1", last_layer(vectors, gallery)
    predicted = LogisticRegression(C=1.0).fit(vectors[tuning], wrong[tuning])
    yield "predicted from the vector", predicted.decision_function(vectors)
    shares = [same[:, :k].mean(axis=1) for k in (5, 10, 30)]
    profile = np.column_stack([distances[:, [0, 1, 4, 9, 29]], *shares])
    ranks = np.log(np.minimum(labelled.ranks, results.depth + 1))
    upper = GradientBoostingRegressor(loss="quantile", alpha=1 - ALPHA, n_estimators=50)
    yield (
        "quantile of the rank, regressed",
        upper.fit(profile[tuning], ranks[tuning]).predict(profile),
    )
    split = labelled[tuning]
    learned = Learned.fit(split.results, split.relevant)
    yield "learned: of the neighbourhood", learned.rank(results).selection_score


def last_layer(vectors: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """(n,) predictive variances of a linear layer under Laplace's approximation, prior 1.

    With a Gaussian likelihood, the Hessian depends on the inputs alone, not on the labels.
    """
    rows = fitted / np.linalg.norm(fitted, axis=1, keepdims=True)
    precision = rows.T @ rows + np.eye(rows.shape[1])
    return np.einsum("nd,dn->n", vectors, np.linalg.solve(precision, vectors.T))


def mean_size(fitted: Quantile | Constant, parts: list[LabelledResults]) -> float:
    """Return the certified mean size of the test queries."""
    tuning, calibration, test = parts
    rule = SetRule(fitted, score(fitted, tuning), score(fitted, calibration))
    return float(rule.sets(test.results, rule.guarantee(Request(ALPHA, DELTA)))[1].mean())


def main() -> None:
    """Compare over random halves."""
    options = parser(__doc__).parse_args()
    table = birds()
    aurocs: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for half in range(HALVES):
        gallery, queries = gallery_and_queries(table, half)
        retriever = rcir.Retriever.from_embeddings(gallery.vectors, gallery.ids, gallery.labels)
        vectors = retriever.labelled(queries.vectors, queries.labels)
        labelled = retriever.search_labelled(vectors)
        n = len(labelled)
        bounds = [round(share * n) for share in SHARES]
        rows = np.split(np.random.default_rng(half).permutation(n), bounds)
        wrong = ~labelled.relevant[:, 0]
        try:
            constant = mean_size(Constant(), [labelled[part] for part in rows])
        except RiskUnattainable:
            continue
        for name, values in uncertainties(retriever, gallery.vectors, labelled, rows[0]):
            changed = labelled.with_uncertainty(np.asarray(values, np.float64))
            parts = [changed[part] for part in rows]
            fitted = Quantile.fit(parts[0].results, parts[0].relevant)
            aurocs.setdefault(name, []).append(roc_auc_score(wrong[rows[2]], values[rows[2]]))
            ratios.setdefault(name, []).append(mean_size(fitted, parts) / constant)
    table_rows = [
        [name, *(f"{value:.3f}" for value in (np.mean(each), np.std(each), np.mean(ratios[name])))]
        for name, each in aurocs.items()
    ]
    figures = {
        f"{kind}_{figure}": float(np.mean(values[kind]))
        for kind in ("cosine", "vote")
        for figure, values in (("auroc_miss", aurocs), ("size_over_constant", ratios))
    }
    columns = ["uncertainty", "AUROC", "deviation", "size over constant"]
    report(f"Frozen features, alpha {ALPHA}", columns, table_rows, figures, options.json)


if __name__ == "__main__":
    main()
