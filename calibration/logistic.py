"""The baseline of learned sizes: a logistic regression on the gallery, with the same bound."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.splits import SearchedSplits
from rcir.autologging import without_autologging
from rcir.metrics.labels import earlier_of_same_label
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import Searcher
from rcir.risk import ScoredResults
from rcir.risk.guarantee import in_plural

FOLDS = 5
# Items x labels x dimensions of all fits (some 3 s on one core), and items of each label.
MAX_WORK, MIN_ITEMS, MIN_DIMENSIONS = 10**9, 5, 64


class Logistic(NamedTuple):
    """Scores of calibration and test queries by logistic regression, or why there are none."""

    sentence: str
    calibration: ScoredResults | None = None
    test: ScoredResults | None = None


def score_by_logistic(splits: SearchedSplits) -> Logistic:
    """Score the labels of queries by a multinomial logistic regression on the gallery.

    It is that of scikit-learn with its defaults, on standardised vectors; scores are -log p, and 0
    for the likeliest label. With leave_one_out each of five models lacks the units that it scores.
    """
    searcher, index = splits.retriever.searcher, splits.retriever.index
    if searcher.labels is None:
        return _refuse("items have no single label each")
    if searcher.gallery.keys is not None:
        return _refuse(f"the gallery is divided by {searcher.options.key}")
    calibration = splits.retriever.require_calibration()
    populations = calibration.miss_rule.evidence.population, splits.test.population
    queries = [calibration.calibration_queries, splits.test.results.require("queries")]
    vectors = np.concatenate([part.vectors for part in queries])
    folds, query_folds = _divide(searcher, searcher.labels, queries)
    names, labels = np.unique(searcher.labels, return_inverse=True)
    size = len(names) ** 2 * max(MIN_DIMENSIONS, vectors.shape[1])
    most = MAX_WORK // (size * len(np.unique(query_folds)))
    if most < MIN_ITEMS:
        return _refuse(f"{len(names):,} labels would take too long")
    order = np.random.default_rng(0).permutation(len(labels))
    rows = np.sort(order[earlier_of_same_label(labels[order][None])[0] < most])
    items, labels, folds = index.vectors_at(rows), labels[rows], folds[rows]
    scores = np.full((len(vectors), len(names)), np.inf, np.float32)
    for fold in np.unique(query_folds).tolist():
        fitted = folds != fold
        if len(present := np.unique(labels[fitted])) < 2:
            return _refuse("items of two labels are needed")
        asked = np.flatnonzero(query_folds == fold)
        scores[np.ix_(asked, present)] = _fit(items[fitted], labels[fitted], vectors[asked])
    ranked = np.argsort(scores, axis=1, kind="stable")
    scores = np.take_along_axis(scores, ranked, axis=1)
    true = [population.labels for population in populations if population.labels is not None]
    relevant = names[ranked] == np.concatenate(true)[:, None]
    calibrated, test = (
        ScoredResults.from_scores(scores[part], relevant[part], population=population)
        for part, population in zip(
            (slice(len(queries[0])), slice(len(queries[0]), None)), populations, strict=True
        )
    )
    source = "" if len(rows) == len(index) else f", at most {most} items of each label"
    if left_out := searcher.options.left_out:
        source += f", without a fifth of its {in_plural(left_out)}, that of the query among them"
    sentence = (
        f"Logistic: the mean size of a logistic regression on the gallery{source}, with the same "
        "calibration queries and bound."
    )
    return Logistic(sentence, calibrated, test)


def _refuse(reason: str) -> Logistic:
    return Logistic(f"Logistic: no logistic regression was fitted ({reason}).")


def _divide(
    searcher: Searcher, labels: NDArray[np.int64], queries: list[Queries]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the folds of items and of queries, -1 for queries that belong to no unit.

    Units of one label are spread over all folds.
    """
    n, units = len(searcher.gallery), searcher.gallery.units
    if not searcher.options.leave_one_out:
        return np.zeros(n, np.int64), np.full(sum(map(len, queries)), -1)
    unique, first = np.unique(units, return_index=True)
    folds = np.full(n + 1, -1)
    folds[unique[np.argsort(labels[first], kind="stable")]] = np.arange(len(unique)) % FOLDS
    of_queries = [part for each in queries if (part := searcher.units(each)) is not None]
    return folds[units], folds[np.minimum(np.concatenate(of_queries), n)]


@without_autologging()
def _fit(
    items: NDArray[np.float32], labels: NDArray[np.int64], queries: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return -log p of the labels, ascending, for queries; 0 for the likeliest one."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(items, labels)
    scores: NDArray[np.float32] = -model.predict_log_proba(queries).astype(np.float32)
    scores[np.arange(len(queries)), scores.argmin(axis=1)] = 0
    return scores
