"""Rankings and uncertainties: every number again with loops, scikit-learn and SciPy.

Vectors and uncertainties come from a table, not from a network: similarities are so far apart that
the rounding of no CPU changes their order.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.spatial.distance import cdist
from scipy.stats import kendalltau
from sklearn.decomposition import PCA
from sklearn.metrics import (
    auc,
    average_precision_score,
    precision_recall_curve,
    roc_auc_score,
)
from sklearn.metrics.pairwise import cosine_distances

from calibration.quality import Quality, assess, pixel_recall
from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.encoders.batches import draw_samples
from rcir.metrics import sample_pairs
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


def mean_of_bins(values, bins):
    """The mean and number of the values in each bin that holds any."""
    return {
        place: (np.mean(values[bins == place]), np.sum(bins == place)) for place in np.unique(bins)
    }


def calibration_errors(uncertainty, low, high, hits, precisions):
    """The three flavours at each k, bin by bin."""
    found, n = {}, len(uncertainty)
    sure = 1 - np.clip((uncertainty - low) / (high - low), 0, 1)
    width = np.minimum((sure * 10).astype(int), 9)
    by_rank = np.empty(n, int)
    for rank, row in enumerate(np.argsort(uncertainty, kind="stable")):
        by_rank[row] = rank * 10 // n  # 0: the most certain
    for k in KS:
        if k not in hits:
            continue
        for flavour, bins, expected, reached in (
            ("btl_width", width, lambda m: m / 10 + 0.05, precisions[k]),
            ("btl_percentile", by_rank, lambda m: 1 - (m + 0.5) / 10, precisions[k]),
            ("rcir", width, lambda m: (m + 1) / 10, hits[k]),
        ):
            found[f"ece_{flavour}_at_{k}"] = sum(
                count / n * abs(mean - expected(place))
                for place, (mean, count) in mean_of_bins(reached, bins).items()
            )
    return found


def area(uncertainty, hit):
    """Under the recall of what is left when the most uncertain are dropped percent by percent."""
    order = np.argsort(-uncertainty, kind="stable")
    curve = [np.mean(hit[order[int(len(hit) * r / 100 + 1e-9) :]]) for r in range(99)]
    return auc(np.arange(99) / 100, curve) / 0.98


def vote(labels):
    """The most frequent label; of several, the first."""
    return Counter(labels).most_common(1)[0][0]


def falling(values, uncertainty, mean):
    """Minus Kendall's tau of 20 bins' order and what `mean` makes of each bin's rows."""
    n = len(uncertainty)
    bins = [[] for _ in range(20)]
    for rank, row in enumerate(np.argsort(uncertainty, kind="stable")):
        bins[rank * 20 // n].append(row)
    return -kendalltau(range(20), [mean(values[rows], rows) for rows in bins]).statistic


def error_of_votes(drawn, labels):
    """Return the calibration error of votes of the draws' nearest labels, binned by agreement."""
    bins = [[] for _ in range(10)]
    votes = []
    for vectors in drawn.double().numpy():
        apart = cdist(vectors, vectors)
        np.fill_diagonal(apart, np.inf)
        votes.append(labels[apart.argmin(axis=1)].tolist())
    for own, label in zip(zip(*votes, strict=True), labels.tolist(), strict=True):
        counts = Counter(own)
        most = max(counts.values())
        predicted = min(each for each, count in counts.items() if count == most)
        bins[min(most * 10 // len(own), 9)].append((most / len(own), predicted == label))
    gaps = (abs(np.subtract(*np.mean(each, axis=0))) * len(each) for each in bins if each)
    return sum(gaps) / len(labels)


def whole_precision(relevant):
    return average_precision_score(relevant, -np.arange(len(relevant)))


def expected_numbers(case):
    """All numbers, from searches of whole rankings."""
    retriever, test, images, gallery = case.retriever, case.test, case.images, case.gallery
    cross, outside = case.cross, case.quality.outside
    g, depth = len(gallery), retriever.depth
    _, order = retriever.index.search(test.results.vectors, g)
    np.testing.assert_array_equal(order[:, :depth], test.results.positions)
    rows = [row for row in range(len(images)) if cross[row].any()]
    rankings = [cross[row][order[row]] for row in rows]
    all_uncertain = test.results.uncertainty
    uncertainty = all_uncertain[rows]
    found, hits, precisions = {}, {}, {}
    for k in (k for k in KS if k <= depth):
        hits[k] = np.array([ranking[:k].any() for ranking in rankings])
        precisions[k] = np.array(
            [
                sum(ranking[: i + 1].mean() for i in range(k) if ranking[i]) / min(k, ranking.sum())
                for ranking in rankings
            ]
        )
        found[f"recall_at_{k}"] = hits[k].mean()
        found[f"map_at_{k}"] = precisions[k].mean()
    totals = [int(ranking.sum()) for ranking in rankings]
    if max(totals) <= depth:
        at_r = [
            sum(ranking[: i + 1].mean() for i in range(total) if ranking[i]) / total
            for ranking, total in zip(rankings, totals, strict=True)
        ]
        found["map_at_r"] = np.mean(at_r)
    tuning = retriever.calibration.main.tuning.uncertainty
    found |= calibration_errors(uncertainty, tuning.min(), tuning.max(), hits, precisions)

    items = retriever.searcher.item_uncertainty
    first = [order[row, 0] for row in rows]
    pair = uncertainty if items is None else uncertainty + items[first]
    right = hits[1].astype(float)
    found["auroc_miss"] = roc_auc_score(1 - right, uncertainty)
    for kind in retriever.searcher.uncertainties:  # what each of them is, tests/retrieval checks
        judged = retriever.searcher.judged(test, kind).results.uncertainty[rows]
        found[f"auroc_miss_{kind}"] = roc_auc_score(1 - right, judged)
    found["ausc"] = area(pair, right)
    found["ausc_query_only"] = area(uncertainty, right)
    found["ausc_oracle"] = area(-right, right)
    found["ausc_random"] = right.mean()
    found["outside_range"] = np.mean(
        [not tuning.min() <= value <= tuning.max() for value in uncertainty]
    )
    whole = np.array([whole_precision(ranking) for ranking in rankings])
    found["pearson_average_precision"] = np.corrcoef(uncertainty, whole)[0, 1]
    if len(rows) >= 100:
        groups = [[] for _ in range(100)]
        for rank, row in enumerate(np.argsort(whole, kind="stable")):
            groups[rank * 100 // len(rows)].append(row)
        means = [(uncertainty[rows].mean(), whole[rows].mean()) for rows in groups]
        found["pearson_percentiles"] = np.corrcoef(np.array(means).T)[0, 1]
        if len(np.unique(whole.round(9))) < len(whole):  # equal ones may stand in any order
            assert images.labels is not None, "matches by relevance are too many for that"
            del found["pearson_percentiles"]
    if "occluded" in images.attributes:
        found["auroc_occlusion"] = roc_auc_score(images.attributes["occluded"], all_uncertain)

    rng = np.random.default_rng(0)
    if images.labels is not None:
        votes = np.array(
            [vote(gallery.labels[order[row, :5]].tolist()) == images.labels[row] for row in rows]
        )
        found["knn_accuracy_gallery"] = votes.mean()
        apart = cdist(test.results.vectors, test.results.vectors)
        np.fill_diagonal(apart, np.inf)
        nearest = images.labels[np.argsort(apart, axis=1, kind="stable")[:, :5]].tolist()
        votes = np.array(
            [vote(own) == label for own, label in zip(nearest, images.labels, strict=True)]
        )
        found["knn_accuracy"] = votes.mean()
        found["kendall_knn"] = falling(votes, all_uncertain, lambda values, _: values.mean())
        pairs = sample_pairs(images.labels, 10_000, rng)
        matching = images.labels[pairs[:, 0]] == images.labels[pairs[:, 1]]
        cosine = np.sum(np.prod(test.results.vectors[pairs].astype(float), axis=1), axis=1)
        found["verification_ap"] = average_precision_score(matching, cosine)
        found["kendall_verification"] = falling(
            matching,
            all_uncertain[pairs].mean(axis=1),
            lambda values, chosen: average_precision_score(values, cosine[chosen]),
        )
        drawn = draw_samples(retriever.encoder, retriever.preprocessing, images.images)
        if drawn is not None:
            found["ece_lam_at_1"] = error_of_votes(drawn, images.labels)
        by_class = [
            whole[images.labels[rows] == label].mean() for label in set(images.labels[rows])
        ]
        found["map_macro"] = np.mean(by_class)
    found["map"] = whole.mean()
    if items is not None:
        removals = [np.argsort(-items, kind="stable"), *(rng.permutation(g) for _ in range(5))]
        cleaned, left_out = [], []
        for removal in removals:
            gone = set(removal[: g // 5].tolist())
            kept = [[cross[row][item] for item in order[row] if item not in gone] for row in rows]
            cleaned.append(np.mean([whole_precision(rest) for rest in kept if any(rest)]))
            left_out.append(sum(not any(rest) for rest in kept))
        found["map_cleaned_20"] = cleaned[0]
        found["map_cleaned_20_random"] = np.mean(cleaned[1:])
        found["unmatched_cleaned_20"] = left_out[0]
    if outside is not None:
        positive = np.repeat([0, 1], [len(all_uncertain), len(outside)])
        score = np.r_[all_uncertain, outside]
        found["ood_auroc"] = roc_auc_score(positive, score)
        found["ood_auprc"] = average_precision_score(positive, score)
        precision, recall, _ = precision_recall_curve(positive, score)
        found["ood_auprc_trapezoid"] = auc(recall, precision)
    return found


def test_every_number_is_what_loops_and_other_libraries_give(case):
    expected, numbers = expected_numbers(case), dict(case.quality.numbers)
    if "pearson_percentiles" not in expected:
        del numbers["pearson_percentiles"]
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
    assert all(curve.count.sum() == n for curve in quality.curves.values())


def of_queries(case, rows):
    """The numbers of some of the queries."""
    images = case.images.subset(np.array(rows))
    return assess(case.retriever, case.retriever.search_labelled(images), images).numbers


def test_few_queries_leave_out_what_needs_many(cases):
    case = cases["unmatched"]
    matched = np.flatnonzero(case.cross.any(axis=1))
    numbers = of_queries(case, matched[:99])
    assert "pearson_percentiles" not in numbers
    assert "pearson_average_precision" in numbers
    numbers = of_queries(case, matched[:2])
    assert {"recall_at_1", "map", "ausc", "ece_rcir_at_1"} < numbers.keys()
    assert not any("percentile" in name or name == "kendall_knn" for name in numbers)
    assert of_queries(case, matched[:1])["map"] > 0


def test_large_galleries_are_not_ranked_as_a_whole(cases, monkeypatch):
    case = cases["unmatched"]
    monkeypatch.setattr("calibration.quality.FULL_GALLERY", len(case.gallery) - 1)
    quality = assess(case.retriever, case.test, case.images)
    assert (quality.cleaning, quality.whole) == (None, 0)
    assert not {"map", "map_macro", "pearson_percentiles", "map_cleaned_20"} & set(quality.numbers)


def test_whole_rankings_are_of_the_first_queries(cases, monkeypatch):
    monkeypatch.setattr("calibration.quality.FULL_QUERIES", 60)
    case = cases["unmatched"]
    quality = assess(case.retriever, case.test, case.images)
    assert quality.whole == 60
    _, order = case.retriever.index.search(case.test.results.vectors, len(case.gallery))
    rows = np.flatnonzero(case.cross.any(axis=1))[:60]
    whole = [whole_precision(case.cross[row][order[row]]) for row in rows]
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
