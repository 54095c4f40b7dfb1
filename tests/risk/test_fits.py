"""Score functions fitted once: what of keys alone is shared is what would be fitted anew."""

import numpy as np
import pytest

from rcir.risk import LabelledResults, Learned, MatchProbability, Reranked
from rcir.risk.fits import FOLDS, Fits


@pytest.fixture(scope="module")
def split(one_key):
    return LabelledResults.of(*one_key(200, 0), one_label=True)


def test_a_score_function_is_fitted_once_on_all_queries_or_those_outside_of_a_fold(split):
    fits, fold = Fits(split), np.arange(200) % FOLDS
    assert fits.fitted(Learned) is fits.fitted(Learned)
    for held_out, rows in ((None, fold >= 0), (3, fold != 3)):
        anew = Learned.fit(split[rows], split.relevant[rows])
        np.testing.assert_array_equal(fits.fitted(Learned, held_out).weights, anew.weights)


def test_what_looks_at_keys_alone_is_the_same_for_images_and_for_labels(split):
    fits = Fits(split)
    fitted = {kind: fits.fitted(kind) for kind in (Learned, MatchProbability, Reranked)}
    fits.crossed(Reranked)
    distinct, anew = fits.distinct(), Fits(split.distinct())
    assert distinct.fitted(Reranked) is fitted[Reranked]
    for held_out in (None, *range(FOLDS)):
        shared, own = (one.fitted(Reranked, held_out) for one in (distinct, anew))
        np.testing.assert_allclose(shared.weights, own.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        distinct.crossed(Reranked).scores, anew.crossed(Reranked).scores, rtol=1e-6
    )
    for kind in (Learned, MatchProbability):
        found = distinct.fitted(kind)
        assert found is not fitted[kind]
        np.testing.assert_array_equal(found.weights, anew.fitted(kind).weights)
