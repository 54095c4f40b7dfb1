"""Scored queries whose risk is known at every threshold."""

import numpy as np

from rcir.risk import ScoredResults


def scored_queries(scores, relevant, n_relevant=None, uncertainty=None):
    """Return queries with these scores; by default all of their matches are candidates."""
    ones = np.ones(len(relevant))
    return ScoredResults.from_scores(
        np.asarray(scores, np.float32),
        relevant,
        n_relevant=relevant.sum(axis=1) if n_relevant is None else n_relevant,
        uncertainty=ones if uncertainty is None else uncertainty,
        selection_score=ones,
    )


def answered(selection_score, missed):
    """Return queries with one candidate each, which is wrong where they are missed."""
    scores = np.zeros((len(missed), 1), np.float32)
    return ScoredResults.from_scores(scores, ~missed[:, None], selection_score=selection_score)


def matched_at(match_scores, uncertainty=None):
    """Return queries whose second candidate is their only match, at these scores."""
    scores = np.stack([np.zeros(len(match_scores)), match_scores], axis=1)
    relevant = np.tile([False, True], (len(scores), 1))
    return scored_queries(scores, relevant, None, uncertainty)


def first_matches_only(queries):
    """Return the same queries with their first match alone: recall is 0 or 1."""
    first = queries.relevant & (np.cumsum(queries.relevant, axis=1) == 1)
    ones = np.ones(len(queries), np.int64)
    return scored_queries(queries.scores, first, ones, queries.uncertainty)
