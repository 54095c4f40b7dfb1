"""Rankings and uncertainties: which metric of which queries. tests/metrics verifies the metrics.

Vectors and uncertainties come from a table, not from a network: similarities are so far apart that
the rounding of no CPU changes their order.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from calibration.quality import Quality, assess
from calibration.splits import SearchedSplits
from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.metrics import (
    average_precision_at_k,
    confidence,
    reliability,
    score_rankings,
    sparsification,
)
from rcir.retrieval.query_uncertainty import available_uncertainties, with_uncertainty
from rcir.retrieval.retriever import Retriever

SIZES = {"gallery": 150, "test": 125, "tuning": 60, "calibration": 60}
NUMBERS = {name: np.arange(n) * 7 % 25 for name, n in SIZES.items()}  # five tens, five units
SEED = 31  # no two squared distances of a test query to the gallery differ by less than 4e-6


def around(rng, numbers):
    """Unit vectors around the centre of each number."""
    centres = np.random.default_rng(1).standard_normal((25, 8))[numbers]
    vectors = centres + 0.9 * rng.standard_normal(centres.shape)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class Table(Encoder):
    """The encoder that looks up the number that the first two pixels of an image spell."""

    def __init__(self, vectors, uncertainty=None):
        super().__init__(EncoderConfig("deterministic", dim=8))
        self.vectors = torch.nn.Parameter(torch.from_numpy(vectors), requires_grad=False)
        self.uncertainty = None if uncertainty is None else torch.from_numpy(uncertainty)

    @staticmethod
    def rows(images):
        high, low = (images[:, 0, 0, :2] * 255).round().long().T
        return 256 * high + low

    def forward(self, images):
        rows = self.rows(images)
        if self.uncertainty is None:
            return Embedding(self.vectors[rows])
        uncertainty = self.uncertainty[rows]
        return Embedding(self.vectors[rows], uncertainty[:, None] / 50, uncertainty)

    @property
    def draws(self):
        return self.uncertainty is not None


@dataclass(frozen=True)
class Case:
    splits: SearchedSplits
    cross: np.ndarray  # (queries, gallery) whether they match, pair by pair
    quality: Quality


@pytest.fixture(scope="module")
def cases():
    """Labels with an encoder that states uncertainties and draws; places with one that does not.

    With labels, one number in five is not in the gallery.
    """
    rng, start, images = np.random.default_rng(2), 0, {}
    for name, n in SIZES.items():
        pixels = rng.integers(0, 256, (n, 8, 16), np.uint8)
        pixels[:, 0, :2] = np.c_[np.divmod(np.arange(start, start + n), 256)]
        occluded = {"occluded": rng.uniform(size=n) < 0.3}
        ids = [str(row) for row in range(start, start + n)]
        images[name] = ImageSet(pixels, NUMBERS[name], ids, occluded)
        start += n

    rng = np.random.default_rng(SEED)
    vectors = {name: around(rng, numbers) for name, numbers in NUMBERS.items()}
    every = np.concatenate(list(vectors.values()))
    uncertainty = rng.gamma(2.0, 0.2, len(every)).astype(np.float32)

    def case(encoder, sets, cross, depth):
        retriever = Retriever.build(encoder, Preprocessing(), sets["gallery"], depth)
        parts = [retriever.search_labelled(sets[part]) for part in ("tuning", "calibration")]
        retriever.calibrate_splits(*parts, "minmax", query_uncertainty="encoder")
        test = retriever.search_labelled(sets["test"])
        searched = SearchedSplits(retriever, "", *parts, test, [], sets["test"])
        return Case(searched, cross, assess(searched))

    rows = np.flatnonzero(NUMBERS["gallery"] % 5 > 0)
    by_label = images | {"gallery": images["gallery"].subset(rows)}
    places = {name: np.c_[np.divmod(numbers, 5)].astype(float) for name, numbers in NUMBERS.items()}
    by_place = {
        name: ImageSet(part.images, None, part.ids, {}, WithinRadius(places[name], 1.0))
        for name, part in images.items()
    }
    same = NUMBERS["test"][:, None] == NUMBERS["gallery"][rows]
    near = np.abs(places["test"][:, None] - places["gallery"]).sum(axis=2) <= 1
    return {
        "labels": case(Table(every, uncertainty), by_label, same, 40),
        "places": case(Table(every), by_place, near, 3),
    }


def ranked(case):
    """Queries with a match, their whole rankings: positions and matches."""
    _, order = case.splits.retriever.index.search(
        case.splits.test.results.vectors, case.cross.shape[1]
    )
    np.testing.assert_array_equal(
        order[:, : case.splits.retriever.depth], case.splits.test.results.positions
    )
    rows = np.flatnonzero(case.cross.any(axis=1))
    rankings = np.take_along_axis(case.cross, order, axis=1)[rows]
    return rows, order[rows], rankings


def expected_numbers(case):
    """Compute all numbers from searches of whole rankings."""
    retriever, test = case.splits.retriever, case.splits.test
    rows, order, rankings = ranked(case)
    totals, right = rankings.sum(axis=1), rankings[:, 0].astype(float)
    uncertainty, items = test.results.uncertainty[rows], retriever.searcher.gallery.uncertainty
    pair = uncertainty if items is None else uncertainty + items[order[:, 0]]
    tuning = retriever.calibration.miss_rule.tuned.uncertainty
    inside = (uncertainty >= tuning.min()) & (uncertainty <= tuning.max())
    expected = {
        "ece": reliability(confidence(uncertainty, tuning.min(), tuning.max()), right > 0).error,
        "auroc_miss": roc_auc_score(1 - right, uncertainty),
        "ausc": sparsification(pair, right).ausc,
        "ausc_oracle": sparsification(-right, right).ausc,
        "ausc_random": right.mean(),
        "outside_range": 1 - inside.mean(),
    }
    if not (matchable := case.cross.any(axis=1)).all():
        odds = case.splits.scored_test.acceptance
        expected["auroc_unmatched"] = roc_auc_score(matchable, odds)
    for k in (1, 5, 10)[: 3 if retriever.depth >= 10 else 1]:
        expected[f"recall_at_{k}"] = rankings[:, :k].any(axis=1).mean()
        expected[f"map_at_{k}"] = average_precision_at_k(rankings, totals, k).mean()
    for kind in available_uncertainties(
        retriever.searcher
    ):  # what each of them is, tests/retrieval checks
        judged = with_uncertainty(retriever.searcher, test, kind).results.uncertainty[rows]
        expected[f"auroc_miss_{kind}"] = roc_auc_score(1 - right, judged)
    if retriever.labels is not None:
        queries = test.results.uncertainty
        expected |= {
            "map_at_r": score_rankings(rankings, totals, (1,)).map_at_r,
            "auroc_occlusion": roc_auc_score(case.splits.images.attributes["occluded"], queries),
        }
    return expected


@pytest.mark.parametrize("name", ["labels", "places"])
def test_every_number_is_that_of_whole_rankings(cases, name):
    numbers = cases[name].quality.numbers
    assert numbers == pytest.approx(expected_numbers(cases[name]), abs=1e-6)


def test_queries_without_a_match_are_counted_and_left_out(cases):
    for case in cases.values():
        assert case.quality.unmatched == np.sum(~case.cross.any(axis=1))
    quality = cases["labels"].quality
    n = SIZES["test"] - quality.unmatched
    assert quality.unmatched > 20
    assert quality.reliability.count.sum() == n


def of_queries(case, rows):
    """The numbers of some of the queries."""
    images = case.splits.images.subset(np.array(rows))
    test = case.splits.retriever.search_labelled(images)
    return assess(replace(case.splits, test=test, images=images)).numbers


def test_uncertainties_beyond_those_of_the_tuning_split_are_counted(cases):
    case = cases["places"]
    assert (case.splits.test.n_relevant > 0).all()
    tuning = case.splits.retriever.calibration.miss_rule.tuned.uncertainty
    uncertainty = np.full(125, np.median(tuning))
    uncertainty[:20], uncertainty[20:50] = tuning.max() + 1, tuning.min() - 1
    uncertainty[100], uncertainty[101] = tuning.max(), tuning.min()
    test = case.splits.test.with_uncertainty(uncertainty)
    numbers = assess(replace(case.splits, test=test)).numbers
    assert numbers["outside_range"] == 0.4


def test_one_kind_of_outcome_has_no_auroc(cases):
    """If every first image is right, there are no wrong ones to distinguish from them."""
    case = cases["places"]
    right = np.flatnonzero(case.splits.test.ranks == 1)
    assert len(right) > 20
    numbers = of_queries(case, right)
    assert "auroc_miss" not in numbers
    assert numbers["recall_at_1"] == numbers["ausc"] == 1
    assert np.isfinite(list(numbers.values())).all()
