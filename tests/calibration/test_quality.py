"""Rankings and uncertainties: which metric of which queries. tests/metrics verifies the metrics.

Vectors and uncertainties come from a table, not from a network: similarities are so far apart that
the rounding of no CPU changes their order.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.metrics import (
    roc_auc_score,
)
from sklearn.metrics.pairwise import cosine_distances

from calibration.quality import Quality, assess, pixel_recall
from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.metrics import (
    OutOfDistribution,
    average_precision,
    average_precision_at_k,
    confidence,
    reliability,
    score_rankings,
    sparsification,
)
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults

KS = (1, 5, 10)
OUTSIDE = np.random.default_rng(5).gamma(2.0, 0.3, 70)
GAP = 1e-6  # between squared distances; those of unit vectors lose 2e-7 in float32
SIZES = {"gallery": 150, "test": 125, "tuning": 60, "calibration": 60}
NUMBERS = {name: np.arange(n) * 7 % 25 for name, n in SIZES.items()}  # five tens, five units


def around(rng, numbers):
    """Unit vectors around the centre of each number."""
    centres = np.random.default_rng(1).standard_normal((25, 8))[numbers]
    vectors = centres + 0.9 * rng.standard_normal(centres.shape)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def far_apart(rng, numbers, gallery):
    """Return such vectors with no two distances equal, among themselves and to the gallery."""
    chosen, seen = np.empty((0, 8), np.float32), np.empty(0)
    for number in numbers:
        while True:
            one = around(rng, [number])
            to_gallery = np.sort(cdist(one, gallery, "sqeuclidean")[0])
            to_others = cdist(one, chosen, "sqeuclidean")[0]
            every = np.sort(np.concatenate([seen, to_others, to_gallery[:1]]))
            if min(np.diff(to_gallery).min(), np.diff(every).min(initial=1)) > GAP:
                break
        chosen, seen = np.concatenate([chosen, one]), every
    return chosen


class Table(Encoder):
    """The encoder that looks up the number that the first two pixels of an image spell."""

    def __init__(self, vectors, draws=None, uncertainty=None):
        super().__init__(EncoderConfig("deterministic", dim=8))
        self.vectors = torch.nn.Parameter(torch.from_numpy(vectors), requires_grad=False)
        self.drawn = None if draws is None else torch.from_numpy(draws)
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
        return self.drawn is not None

    def _samples(self, images, generator):
        return None if self.drawn is None else self.drawn[:, self.rows(images)]


@dataclass(frozen=True)
class Case:
    retriever: Retriever
    test: LabelledResults
    images: ImageSet
    gallery: ImageSet
    cross: np.ndarray  # (queries, gallery) whether they match, pair by pair
    quality: Quality


@pytest.fixture(scope="module")
def encoders():
    """One that is certain, and one that states uncertainties and draws."""
    rng = np.random.default_rng(0)
    vectors = {name: around(rng, numbers) for name, numbers in NUMBERS.items()}
    vectors["test"] = far_apart(rng, NUMBERS["test"], vectors["gallery"])
    every = np.concatenate(list(vectors.values()))
    draws = np.stack([every] * 3)
    for number in (1, 2):  # a draw of an image is another one of the same number
        draws[number, 150:275] = np.roll(vectors["test"], 25 * number, axis=0)
    uncertainty = rng.gamma(2.0, 0.2, len(every)).astype(np.float32)
    return Table(every), Table(every, draws, uncertainty)


def plain(images, numbers):
    return images


def shared(images, numbers):
    digits = np.c_[numbers // 5, 5 + numbers % 5].tolist()
    return ImageSet(images.images, None, images.ids, {}, SharedLabel.of_lists(digits, 10))


def near(images, numbers):
    places = np.c_[numbers // 5, numbers % 5].astype(float)
    return ImageSet(images.images, None, images.ids, {}, WithinRadius(places, 1.0))


def same(one, other):
    return one == other


def share_a_digit(one, other):
    return one // 5 == other // 5 or one % 5 == other % 5


def differ_by_one(one, other):
    return abs(one // 5 - other // 5) + abs(one % 5 - other % 5) <= 1


KINDS = {
    "unmatched": (plain, same, 40),
    "certain": (plain, same, 40),
    "shared": (shared, share_a_digit, 40),
    "radius": (near, differ_by_one, 3),
}


@pytest.fixture(scope="module")
def cases(encoders):
    """By name, a retriever, its test queries, and the quality that is under test."""
    rng, start, images = np.random.default_rng(2), 0, {}
    for name, n in SIZES.items():
        pixels = rng.integers(0, 256, (n, 8, 16), np.uint8)
        pixels[:, 0, :2] = np.c_[np.divmod(np.arange(start, start + n), 256)]
        occluded = {"occluded": rng.uniform(size=n) < 0.3}
        ids = [str(row) for row in range(start, start + n)]
        images[name] = ImageSet(pixels, NUMBERS[name], ids, occluded)
        start += n

    def case(name):
        change, match, depth = KINDS[name]
        sets = {part: change(images[part], NUMBERS[part]) for part in SIZES}
        numbers = {part: values.tolist() for part, values in NUMBERS.items()}
        if name == "unmatched":  # one number in five is not in the gallery
            rows = np.flatnonzero(NUMBERS["gallery"] % 5 > 0)
            sets["gallery"] = images["gallery"].subset(rows)
            numbers["gallery"] = NUMBERS["gallery"][rows].tolist()
        encoder = encoders[name != "certain"]
        retriever = Retriever.build(encoder, Preprocessing(), sets["gallery"], depth)
        parts = [retriever.search_labelled(sets[part]) for part in ("tuning", "calibration")]
        retriever.calibrate_splits(*parts, "minmax", query_uncertainty="encoder")
        test = retriever.search_labelled(sets["test"])
        cross = [[match(one, other) for other in numbers["gallery"]] for one in numbers["test"]]
        outside = None if name == "certain" else OUTSIDE
        quality = assess(retriever, test, sets["test"], outside)
        return Case(retriever, test, sets["test"], sets["gallery"], np.array(cross), quality)

    return {name: case(name) for name in KINDS}


@pytest.fixture(params=KINDS)
def case(request, cases):
    return cases[request.param]


def expected_numbers(case):
    """All numbers, from searches of whole rankings; `tests/metrics` checks the metrics."""
    retriever, test, images, outside = case.retriever, case.test, case.images, case.quality.outside
    depth = retriever.depth
    _, order = retriever.index.search(test.results.vectors, len(case.gallery))
    np.testing.assert_array_equal(order[:, :depth], test.results.positions)
    rows = np.flatnonzero(case.cross.any(axis=1))
    rankings = np.take_along_axis(case.cross, order, axis=1)[rows]
    totals = rankings.sum(axis=1)
    all_uncertain = test.results.uncertainty
    uncertainty = all_uncertain[rows]
    hits = {k: rankings[:, :k].any(axis=1) for k in KS if k <= depth}
    precisions = {k: average_precision_at_k(rankings, totals, k) for k in hits}
    found = {f"recall_at_{k}": values.mean() for k, values in hits.items()}
    found |= {f"map_at_{k}": values.mean() for k, values in precisions.items()}
    if totals.max() <= depth:
        found["map_at_r"] = score_rankings(rankings, totals, (1,)).map_at_r
    tuning = retriever.calibration.main.tuning.uncertainty
    certain = confidence(uncertainty, tuning.min(), tuning.max())
    found["ece"] = reliability(certain, hits[1]).error

    items = retriever.searcher.item_uncertainty
    pair = uncertainty if items is None else uncertainty + items[order[rows, 0]]
    right = hits[1].astype(float)
    found["auroc_miss"] = roc_auc_score(1 - right, uncertainty)
    for kind in retriever.searcher.uncertainties:  # what each of them is, tests/retrieval checks
        judged = retriever.searcher.judged(test, kind).results.uncertainty[rows]
        found[f"auroc_miss_{kind}"] = roc_auc_score(1 - right, judged)
    found["ausc"] = sparsification(pair, right).ausc
    found["ausc_oracle"] = sparsification(-right, right).ausc
    found["ausc_random"] = right.mean()
    inside = (uncertainty >= tuning.min()) & (uncertainty <= tuning.max())
    found["outside_range"] = 1 - inside.mean()
    whole = average_precision(rankings, totals)
    found["map"] = whole.mean()
    found["pearson_average_precision"] = np.corrcoef(uncertainty, whole)[0, 1]
    if "occluded" in images.attributes:
        found["auroc_occlusion"] = roc_auc_score(images.attributes["occluded"], all_uncertain)
    if images.labels is not None:
        by_class = [whole[images.labels[rows] == one].mean() for one in set(images.labels[rows])]
        found["map_macro"] = np.mean(by_class)
    if outside is not None:
        apart = OutOfDistribution.of(all_uncertain, outside)
        found["ood_auroc"], found["ood_auprc"] = apart.auroc, apart.auprc
    return found


def test_every_number_is_that_of_whole_rankings(case):
    expected, numbers = expected_numbers(case), case.quality.numbers
    assert set(numbers) == set(expected)
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value, abs=1e-6), name


def test_queries_without_a_match_are_counted_and_left_out(cases):
    for case in cases.values():
        assert case.quality.unmatched == np.sum(~case.cross.any(axis=1))
    quality = cases["unmatched"].quality
    n = SIZES["test"] - quality.unmatched
    assert quality.unmatched > 20
    assert quality.whole == n
    assert quality.reliability.count.sum() == n


def of_queries(case, rows):
    """The numbers of some of the queries."""
    images = case.images.subset(np.array(rows))
    return assess(case.retriever, case.retriever.search_labelled(images), images).numbers


def test_few_queries_leave_out_what_needs_many(cases):
    case = cases["unmatched"]
    matched = np.flatnonzero(case.cross.any(axis=1))
    assert {"recall_at_1", "map", "ausc", "ece"} < of_queries(case, matched[:2]).keys()
    numbers = of_queries(case, matched[:1])
    assert numbers["map"] > 0
    assert "pearson_average_precision" not in numbers


def test_large_galleries_are_not_ranked_as_a_whole(cases, monkeypatch):
    case = cases["unmatched"]
    monkeypatch.setattr("calibration.quality.FULL_GALLERY", len(case.gallery) - 1)
    quality = assess(case.retriever, case.test, case.images)
    assert quality.whole == 0
    assert not {"map", "map_macro", "pearson_average_precision"} & set(quality.numbers)


def test_whole_rankings_are_of_the_first_queries(cases, monkeypatch):
    monkeypatch.setattr("calibration.quality.FULL_QUERIES", 60)
    case = cases["unmatched"]
    quality = assess(case.retriever, case.test, case.images)
    assert quality.whole == 60
    _, order = case.retriever.index.search(case.test.results.vectors, len(case.gallery))
    rows = np.flatnonzero(case.cross.any(axis=1))[:60]
    rankings = np.take_along_axis(case.cross, order, axis=1)[rows]
    whole = average_precision(rankings, rankings.sum(axis=1))
    assert quality.numbers["map"] == pytest.approx(np.mean(whole))
    expected = np.corrcoef(case.test.results.uncertainty[rows], whole)[0, 1]
    assert quality.numbers["pearson_average_precision"] == pytest.approx(expected)


def test_uncertainties_beyond_those_of_the_tuning_split_are_counted(cases):
    case = cases["certain"]
    assert (case.test.n_relevant > 0).all()
    tuning = case.retriever.calibration.main.tuning.uncertainty
    uncertainty = np.full(125, np.median(tuning))
    uncertainty[:20], uncertainty[20:50] = tuning.max() + 1, tuning.min() - 1
    uncertainty[100], uncertainty[101] = tuning.max(), tuning.min()
    test = case.test.with_uncertainty(uncertainty)
    numbers = assess(case.retriever, test, case.images).numbers
    assert numbers["outside_range"] == 0.4


def test_one_kind_of_outcome_has_no_auroc(cases):
    """If every first image is right, there are no wrong ones to distinguish from them."""
    case = cases["certain"]
    right = np.flatnonzero(case.test.ranks == 1)
    assert len(right) > 20
    numbers = of_queries(case, right)
    assert "auroc_miss" not in numbers
    assert numbers["recall_at_1"] == numbers["ausc"] == 1
    assert np.isfinite(list(numbers.values())).all()


def pixels(images):
    """32 x 32 in RGB, by Pillow."""
    small = [Image.fromarray(each).convert("RGB").resize((32, 32), 2) for each in images]
    return np.stack([np.asarray(one, float).transpose(2, 0, 1).reshape(-1) for one in small])


def test_recall_of_pixels_is_that_of_the_nearest_principal_components(splits):
    fitted = PCA(64, svd_solver="full").fit(pixels(splits.train.images))
    gallery, queries = (
        fitted.transform(pixels(part.images)) for part in (splits.gallery, splits.test)
    )
    nearest = cosine_distances(queries, gallery).argmin(1)
    has = np.isin(splits.test.labels, splits.gallery.labels)
    expected = (splits.gallery.labels[nearest] == splits.test.labels)[has].mean()
    # Pillow resizes otherwise by a little, and the randomized components are nearly those.
    assert pixel_recall(splits) == pytest.approx(expected, abs=0.03)
    assert expected > 0.1
    assert pixel_recall(replace(splits, gallery=splits.test)) == 1
    others = splits.gallery.subset(np.flatnonzero(splits.gallery.labels > 10**6))
    assert pixel_recall(replace(splits, gallery=others)) is None
    assert pixel_recall(replace(splits, train=splits.train.subset(np.array([0])))) is None
