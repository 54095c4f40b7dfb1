"""Queries of which the risk at every threshold is known."""

import numpy as np

from rcir.risk import LabelledResults


def labelled(candidate_scores, relevant, totals=None, uncertainty=None):
    """Queries with these scores and matches; unless given, all of their matches are candidates."""
    ones = np.ones(len(relevant))
    return LabelledResults.from_arrays(
        {
            "candidate_scores": np.asarray(candidate_scores, np.float32),
            "relevant": relevant,
            "totals": relevant.sum(axis=1) if totals is None else totals,
            "uncertainty": ones if uncertainty is None else uncertainty,
            "selection_score": ones,
        }
    )


def matched_at(scores, uncertainty=None):
    """Queries whose second candidate is their only match, at these scores."""
    candidate_scores = np.stack([np.zeros(len(scores)), scores], axis=1)
    return labelled(candidate_scores, np.tile([False, True], (len(scores), 1)), None, uncertainty)


def first_matches_only(queries):
    """The same queries with their first match alone: sets lack all or nothing."""
    first = queries.relevant & (np.cumsum(queries.relevant, axis=1) == 1)
    ones = np.ones(len(queries), np.int64)
    return labelled(queries.candidate_scores, first, ones, queries.uncertainty)
