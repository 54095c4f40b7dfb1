"""Rankings and uncertainties: every number again with loops, scikit-learn and SciPy."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import kendalltau
from sklearn.metrics import (
    auc,
    average_precision_score,
    precision_recall_curve,
    roc_auc_score,
)

from calibration.quality import assess
from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import draw_samples
from rcir.metrics import sample_pairs
from rcir.retrieval.retriever import Retriever

KS = (1, 5, 10)
OUTSIDE = np.random.default_rng(5).gamma(2.0, 0.05, 70)


def built(splits, encoder, of, depth=40):
    """A retriever of the splits as `of` changes them, the queries it judged, and both sets."""
    gallery, test = of(splits.gallery), of(splits.calibration)
    retriever = Retriever.build(encoder, Preprocessing(), gallery, depth)
    parts = [retriever.search_labelled(of(part)) for part in (splits.tuning, splits.test)]
    retriever.calibrate(*parts, score_function="minmax")
    return retriever, retriever.search_labelled(test), test, gallery


def as_relevance(make):
    """Image sets without labels: what matches follows from tens and units of the numbers."""

    def change(images):
        tens, units = np.divmod(np.asarray(images.labels), 10)
        return ImageSet(images.images, None, images.ids, {}, make(tens, units))

    return change


def sharing(tens, units):
    return SharedLabel.of_lists(np.c_[tens, 10 + units].tolist(), 20)


def near(tens, units):
    return WithinRadius(np.c_[tens, units].astype(float), 1.0)


def same(one, other):
    return one == other


def share_a_digit(one, other):
    return one // 10 == other // 10 or one % 10 == other % 10


def differ_by_one(one, other):
    return abs(one // 10 - other // 10) + abs(one % 10 - other % 10) <= 1


@pytest.fixture(scope="module")
def cases(splits, outcome):
    """By name: retriever, test queries judged, their images, the gallery's, what matches."""
    dropout = build_encoder(
        EncoderConfig("mc-dropout", dim=16, options={"passes": 3}), 1, (8, 16)
    ).eval()
    plain = build_encoder(EncoderConfig("deterministic", dim=8), 1, (8, 16)).eval()

    def lacking(images):
        if images is not splits.gallery:
            return images
        return images.subset(np.flatnonzero(images.labels % 3 > 0))

    parts = outcome.splits.test, outcome.splits.gallery
    return {
        "trained": (outcome.retriever, outcome.test, *parts, same),
        "unmatched": (*built(splits, dropout, lacking), same),
        "plain": (*built(splits, plain, lambda images: images, 150), same),
        "shared": (*built(splits, dropout, as_relevance(sharing)), share_a_digit),
        "radius": (*built(splits, dropout, as_relevance(near), 3), differ_by_one),
    }


def numbers_of(images, splits, outcome):
    """The two-digit number of each image, also of sets that do not know it."""
    known = {}
    for parts in (splits, outcome.splits):
        for name in ("gallery", "calibration", "test"):
            part = getattr(parts, name)
            known |= {id(part.images): part.labels}
    return known.get(id(images.images), images.labels)


@pytest.fixture(scope="module")
def cross(cases, splits, outcome):
    """By name, (n, g) whether each query and each gallery image match, pair by pair."""
    found = {}
    for name, (_, _, images, gallery, match) in cases.items():
        pair = [numbers_of(each, splits, outcome).tolist() for each in (images, gallery)]
        found[name] = np.array([[match(one, other) for other in pair[1]] for one in pair[0]])
    return found


@pytest.fixture(scope="module")
def measured(cases, outcome):
    """By name, the quality that is under test."""
    qualities = {"trained": outcome.evaluation.quality}
    for name in ("unmatched", "plain", "shared", "radius"):
        retriever, test, images, *_ = cases[name]
        outside = None if name == "plain" else OUTSIDE
        qualities[name] = assess(retriever, test, images, outside)
    return qualities


CASES = ("trained", "unmatched", "plain", "shared", "radius")


@pytest.fixture(params=CASES)
def case(request, cases, cross, measured):
    name = request.param
    return cases[name][:4], cross[name], measured[name]


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
    """Of the labels of the nearest other image, draw by draw, in bins of their agreement."""
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


def of_neighbourhoods(retriever, test, rows, right):
    """AUROCs of the uncertainties that show in what was found; draws are of tests/retrieval."""
    values, relevance = {"gap": []}, retriever.relevance
    for row in rows:
        near, away = test.positions[row], test.distances[row].astype(np.float64)
        other = np.arange(len(near)) > 0
        if retriever.labels is not None:
            other = retriever.labels[near] != retriever.labels[near[0]]
        values["gap"].append(away[0] / away[other].min() if other.any() else 0)
        if isinstance(relevance, WithinRadius):
            apart = relevance.places[near[:10]]
            away = np.square(apart - apart.mean(0)).sum(1)  # summed up so: equal ones stay equal
            values.setdefault("spread", []).append(np.sqrt(away.mean()))
    for kind in {"agreement", "overlap"} & set(retriever.uncertainties):
        values[kind] = retriever.judged(test, kind).uncertainty[rows]
    return {f"auroc_miss_{kind}": roc_auc_score(1 - right, each) for kind, each in values.items()}


def expected_numbers(retriever, test, images, gallery, cross, outside):
    """All numbers, from searches of whole rankings."""
    g, depth = len(gallery), retriever.depth
    _, order = retriever.index.search(test.vectors, g)
    np.testing.assert_array_equal(order[:, :depth], test.positions)
    rows = [row for row in range(len(images)) if cross[row].any()]
    rankings = [cross[row][order[row]] for row in rows]
    all_uncertain = test.uncertainty
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
    tuning = retriever.controllers[None].tuning.uncertainty
    found |= calibration_errors(uncertainty, tuning.min(), tuning.max(), hits, precisions)

    items = retriever.item_uncertainty
    first = [order[row, 0] for row in rows]
    pair = uncertainty if items is None else uncertainty + items[first]
    right = hits[1].astype(float)
    found["auroc_miss"] = roc_auc_score(1 - right, uncertainty)
    vectors = retriever.index.vectors_at(np.arange(len(retriever.index)))
    own = test.queries.uncertainty
    cosine = np.array([cdist(test.vectors[[row]], vectors, "cosine").min() for row in rows])
    known = gallery.relevance
    voted = np.array(
        [
            -known.subset(order[row, :1]).of(known, order[[row], : min(30, depth)]).sum()
            for row in rows
        ]
    )
    found["auroc_miss_own"] = roc_auc_score(1 - right, cosine if own is None else own[rows])
    found["auroc_miss_cosine"] = roc_auc_score(1 - right, cosine)
    found["auroc_miss_vote"] = roc_auc_score(1 - right, voted)
    found |= of_neighbourhoods(retriever, test, rows, right)
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
    if "occluded" in images.attributes:
        found["auroc_occlusion"] = roc_auc_score(images.attributes["occluded"], all_uncertain)

    rng = np.random.default_rng(0)
    if images.labels is not None:
        votes = np.array(
            [vote(gallery.labels[order[row, :5]].tolist()) == images.labels[row] for row in rows]
        )
        found["knn_accuracy_gallery"] = votes.mean()
        apart = cdist(test.vectors, test.vectors)
        np.fill_diagonal(apart, np.inf)
        nearest = images.labels[np.argsort(apart, axis=1, kind="stable")[:, :5]].tolist()
        votes = np.array(
            [vote(own) == label for own, label in zip(nearest, images.labels, strict=True)]
        )
        found["knn_accuracy"] = votes.mean()
        found["kendall_knn"] = falling(votes, all_uncertain, lambda values, _: values.mean())
        pairs = sample_pairs(images.labels, 10_000, rng)
        matching = images.labels[pairs[:, 0]] == images.labels[pairs[:, 1]]
        cosine = np.sum(np.prod(test.vectors[pairs].astype(float), axis=1), axis=1)
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
    (retriever, test, images, gallery), cross, quality = case
    expected = expected_numbers(retriever, test, images, gallery, cross, quality.outside)
    # Which is of the pictures that train; see test_baseline.py.
    assert set(quality.numbers) - {"recall_at_1_pixels"} == set(expected)
    for name, value in expected.items():
        # Distances may tie in single precision: a vote is one of thousands, a pair of 100,000s.
        close = {"ece_lam_at_1": 2e-3, "verification_ap": 5e-6}.get(name, 1e-6)
        assert quality.numbers[name] == pytest.approx(value, abs=close), name


def test_queries_without_a_match_are_counted_and_left_out(cases, cross, measured):
    for name in CASES:
        assert measured[name].unmatched == np.sum(~cross[name].any(axis=1))
    quality = measured["unmatched"]
    assert quality.unmatched > 50
    n = len(cases["unmatched"][2]) - quality.unmatched
    assert quality.whole == n
    assert quality.reliability.count.sum() == n
    assert all(curve.count.sum() == n for curve in quality.curves.values())


def test_without_an_uncertainty_of_items_the_gallery_is_not_cleaned(cases, measured):
    """The uncertainty of a query is then one minus the cosine to its nearest image."""
    retriever, test, _, gallery, _ = cases["plain"]
    quality = measured["plain"]
    assert quality.cleaning is None
    assert not any("cleaned" in name for name in quality.numbers)
    assert quality.numbers["ausc"] == quality.numbers["ausc_query_only"]
    vectors = retriever.search(gallery.images).vectors.astype(float)
    nearest = (test.vectors.astype(float) @ vectors.T).max(axis=1)
    np.testing.assert_allclose(test.uncertainty, 1 - nearest, atol=1e-5)


@pytest.mark.parametrize("name", ["shared", "radius"])
def test_without_one_label_an_image_what_takes_labels_is_left_out(measured, name):
    numbers = measured[name].numbers
    for left_out in ("knn", "verification", "macro", "occlusion", "lam"):
        assert not any(left_out in known for known in numbers), left_out
    assert {"recall_at_1", "map", "ausc", "map_cleaned_20", "ood_auroc"} < numbers.keys()


def test_no_deeper_than_was_searched(measured):
    """Three candidates: recall at 1 only, and no MAP@R of more matches than that."""
    assert {"recall_at_1", "map_at_1"} < measured["radius"].numbers.keys()
    assert not any(name.endswith(("_at_5", "_at_10")) for name in measured["radius"].numbers)
    assert "map_at_r" not in measured["radius"].numbers


def test_pairs_are_told_apart_by_their_distance_not_against_it(cases, measured):
    """The average precision of all pairs there are, matching ones weighing half."""
    _, test, images, *_ = cases["trained"]
    one, other = np.triu_indices(len(images), 1)
    match = images.labels[one] == images.labels[other]
    weight = np.where(match, 1 / match.sum(), 1 / (~match).sum())
    vectors = test.vectors.astype(float)
    score = -np.linalg.norm(vectors[one] - vectors[other], axis=1)
    whole = average_precision_score(match, score, sample_weight=weight)
    assert measured["trained"].numbers["verification_ap"] == pytest.approx(whole, abs=0.02)
    assert whole > 0.6


def test_the_curves_are_those_of_the_numbers(case):
    _, _, quality = case
    for name, curve in quality.curves.items():
        assert quality.numbers[f"ece_{name}"] == curve.error
    assert quality.numbers["ausc"] == quality.sparsification.ausc
    assert quality.sparsification.curve[0] == pytest.approx(quality.numbers["recall_at_1"])
    if quality.cleaning is not None:
        assert quality.cleaning.cleaned[0] == pytest.approx(quality.numbers["map"])
        assert quality.cleaning.fractions[2] == 0.2


def test_another_seed_draws_other_pairs_only(cases, measured):
    retriever, test, images, *_ = cases["unmatched"]
    other = assess(retriever, test, images, OUTSIDE, seed=1).numbers
    differing = {
        name for name, value in measured["unmatched"].numbers.items() if other[name] != value
    }
    drawn = {"verification_ap", "kendall_verification", "map_cleaned_20_random"}
    assert {"verification_ap"} <= differing <= drawn


def first(cases, rows):
    """The unmatched case with some of its queries."""
    retriever, _, images, *_ = cases["unmatched"]
    chosen = images.subset(np.array(rows))
    return retriever, retriever.search_labelled(chosen), chosen


def test_few_queries_leave_out_what_needs_many(cases, cross):
    matched = np.flatnonzero(cross["unmatched"].any(axis=1))
    numbers = assess(*first(cases, matched[:99])).numbers
    assert "pearson_percentiles" not in numbers
    assert "pearson_average_precision" in numbers
    numbers = assess(*first(cases, matched[:2])).numbers
    assert {"recall_at_1", "map", "ausc", "ece_rcir_at_1"} < numbers.keys()
    assert not any("percentile" in name or name == "kendall_knn" for name in numbers)
    assert assess(*first(cases, matched[:1])).numbers["map"] > 0


def test_pairs_of_too_few_levels_of_uncertainty_have_no_trend(cases, cross):
    """One pair that matches is drawn thousands of times, and is of one bin."""
    labels = cases["unmatched"][2].labels
    matched = np.flatnonzero(cross["unmatched"].any(axis=1))
    _, once = np.unique(labels[matched], return_index=True)
    double = next(row for row in matched if row not in matched[once])
    numbers = assess(*first(cases, [*matched[once], double])).numbers
    assert "kendall_verification" not in numbers
    assert 0 < numbers["verification_ap"] <= 1


def test_large_galleries_are_not_ranked_as_a_whole(cases, monkeypatch):
    retriever, test, images, *_ = cases["unmatched"]
    monkeypatch.setattr("calibration.quality.FULL_GALLERY", len(retriever.index) - 1)
    quality = assess(retriever, test, images)
    assert quality.cleaning is None
    assert quality.whole == 0
    numbers = quality.numbers.keys()
    assert not {"map", "map_macro"} & numbers
    assert not any(name.startswith("pearson") or "cleaned" in name for name in numbers)
    assert quality.outside is None
    assert not any(name.startswith("ood") for name in quality.numbers)


def test_whole_rankings_are_of_as_many_queries_as_are_said(cases, cross, monkeypatch):
    monkeypatch.setattr("calibration.quality.FULL_QUERIES", 120)
    retriever, test, images, gallery, _ = cases["unmatched"]
    quality = assess(retriever, test, images)
    assert quality.whole == 120
    _, order = retriever.index.search(test.vectors, len(gallery))
    rows = np.flatnonzero(cross["unmatched"].any(axis=1))[:120]
    whole = [whole_precision(cross["unmatched"][row][order[row]]) for row in rows]
    assert quality.numbers["map"] == pytest.approx(np.mean(whole))
    expected = np.corrcoef(test.uncertainty[rows], whole)[0, 1]
    assert quality.numbers["pearson_average_precision"] == pytest.approx(expected)


def test_uncertainties_beyond_those_of_the_tuning_split_are_counted(cases):
    """A quarter of the queries is given an uncertainty that the tuning split never had."""
    retriever, test, images, *_ = cases["plain"]
    tuning = retriever.controllers[None].tuning.uncertainty
    uncertainty = np.full(400, np.median(tuning))
    uncertainty[:60], uncertainty[60:100] = tuning.max() + 1, tuning.min() - 1
    uncertainty[100], uncertainty[101] = tuning.max(), tuning.min()
    judged = replace(test, uncertainty=uncertainty)
    numbers = assess(retriever, judged, images).numbers
    assert (test.totals > 0).all()
    assert numbers["outside_range"] == 0.25


def test_one_kind_of_outcome_has_no_auroc(cases):
    """If each nearest image is right, what tells wrong ones apart is not defined."""
    retriever, test, images, *_ = cases["plain"]
    right = np.flatnonzero(test.ranks == 1)
    chosen = images.subset(right)
    assert len(right) > 20
    numbers = assess(retriever, retriever.search_labelled(chosen), chosen).numbers
    assert "auroc_miss" not in numbers
    assert numbers["recall_at_1"] == numbers["ausc"] == 1
    assert all(np.isfinite(value) for value in numbers.values())
