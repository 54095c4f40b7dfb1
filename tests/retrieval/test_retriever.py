from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import (
    InvalidConfig,
    InvalidData,
    InvalidImage,
    InvalidRiskLevel,
    RiskUnattainable,
    StaleCalibration,
)
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save
from rcir.risk import SCORE_FUNCTIONS, LabelledResults


def same(first, second):
    return (
        first.ids == second.ids
        and first.labels == second.labels
        and first.uncertainty == second.uncertainty
        and np.array_equal(first.distances, second.distances)
    )


def vectors(retriever, images):
    embedding = retriever.encoder.embed(retriever.preprocessing(images))
    return embedding.vectors.double().numpy(), embedding.uncertainty.double().numpy()


def test_an_answer_is_the_start_of_the_brute_force_ranking(retriever, splits):
    queries = splits.test.images[:20]
    gallery, _ = vectors(retriever, splits.gallery.images)
    asked, uncertainty = vectors(retriever, queries)
    split = np.sort(retriever.search(splits.tuning.images).uncertainty)
    for row, answer in enumerate(retriever.retrieve(list(queries), 0.3, 0.1)):
        distances = np.linalg.norm(gallery - asked[row], axis=1)
        order = distances.argsort(kind="stable")
        # The tolerance: of uncertainties, and of threshold.
        share = max(1, (split <= 1.001 * uncertainty[row]).sum()) / len(split)
        # Threshold is stored in single precision; threshold * share is a multiple of 1/200 at
        # worst.
        size = min(150, 1 + int(1.001 * answer.guarantee.threshold * share + 1e-3))
        assert answer.size == size
        np.testing.assert_allclose(answer.distances, distances[order[:size]], atol=1e-5)
        rows = [splits.gallery.ids.index(name) for name in answer.ids]
        np.testing.assert_allclose(distances[rows], distances[order[:size]], atol=1e-5)
        assert list(answer.labels) == splits.gallery.labels[rows].tolist()
        assert answer.uncertainty == pytest.approx(uncertainty[row])


def test_calibration_queries_are_missed_as_often_as_the_bound_allows(retriever, splits):
    answers = retriever.retrieve(list(splits.calibration.images), 0.3, 0.1)
    missed = sum(
        label not in answer.labels
        for label, answer in zip(splits.calibration.labels, answers, strict=True)
    )
    # P(Binomial(400, .3) <= 107) = .085 and P(Binomial(400, .3) <= 108) = .104
    assert missed <= 107
    assert missed > 90
    assert answers[0].guarantee.n_calibration == 400
    assert answers[0].guarantee.risk_bound <= 0.3


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_every_score_function_allows_the_misses_that_the_bound_does(
    retriever, splits, score_function
):
    own = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        labels=splits.gallery.labels,
        depth=150,
        item_uncertainty=np.array(retriever.item_uncertainty),
    )
    own.calibrate(
        own.search_labelled(splits.tuning), own.search_labelled(splits.calibration), score_function
    )
    images, labels = list(splits.calibration.images), splits.calibration.labels
    for distinct in (None, "label"):
        missed = sum(
            label not in answer.labels
            for label, answer in zip(
                labels, own.retrieve(images, 0.3, 0.1, distinct=distinct), strict=True
            )
        )
        # P(Binomial(400, .3) <= 107) = .085; ties of prices, of which equal sizes have many, cost.
        assert missed <= 107
        assert missed > (90 if score_function == "constant" else 104)
    with pytest.raises(RiskUnattainable):
        own.retrieve(images[0], 1e-4, 0.1)


@pytest.fixture(scope="module")
def reranked(retriever, splits):
    """The same gallery, with sets that take the likeliest label first."""
    own = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        labels=splits.gallery.labels,
        depth=150,
        item_uncertainty=np.array(retriever.item_uncertainty),
    )
    own.calibrate(
        own.search_labelled(splits.tuning), own.search_labelled(splits.calibration), "reranked"
    )
    return own


def test_what_is_ranked_anew_keeps_its_name_label_and_distance(reranked, splits):
    queries = splits.test.images
    gallery, _ = vectors(reranked, splits.gallery.images)
    asked, _ = vectors(reranked, queries)
    out_of_order = 0
    for row, answer in enumerate(reranked.retrieve(list(queries), 0.3, 0.1)):
        distances = np.linalg.norm(gallery - asked[row], axis=1)
        rows = [splits.gallery.ids.index(name) for name in answer.ids]
        assert len(set(rows)) == answer.size
        np.testing.assert_allclose(answer.distances, distances[rows], atol=1e-5)
        assert list(answer.labels) == splits.gallery.labels[rows].tolist()
        out_of_order += bool((np.diff(answer.distances) < 0).any())
    assert out_of_order > 50


def test_what_is_ranked_anew_takes_the_nearest_image_of_each_label_first(reranked, splits):
    gallery, _ = vectors(reranked, splits.gallery.images)
    queries = splits.test.images[:20]
    asked, _ = vectors(reranked, queries)
    for row, answer in enumerate(reranked.retrieve(list(queries), 0.1, 0.1)):
        distances = np.linalg.norm(gallery - asked[row], axis=1)
        found = np.sort(distances)[149]  # as deep as was searched
        known = set(splits.gallery.labels[distances <= found].tolist())
        width = min(answer.size, len(known))
        assert len(set(answer.labels[:width])) == width
        for label, distance in zip(answer.labels[:width], answer.distances[:width], strict=True):
            nearest = distances[splits.gallery.labels == label].min()
            assert distance == pytest.approx(nearest, abs=1e-5)
        # What repeats a label follows as it stood.
        assert (np.diff(answer.distances[len(known) :]) >= -1e-6).all()


def test_less_risk_adds_to_what_is_ranked_anew(reranked, splits):
    queries = list(splits.test.images[:20])
    strict, lenient = (reranked.retrieve(queries, alpha, 0.1) for alpha in (0.1, 0.5))
    for more, fewer in zip(strict, lenient, strict=True):
        assert more.ids[: fewer.size] == fewer.ids
    assert sum(each.size for each in strict) > sum(each.size for each in lenient)
    # One label each: sets of labels and sets of images begin alike.
    labels = reranked.retrieve(queries, 0.5, 0.1, distinct="label")
    for each, other in zip(labels, lenient, strict=True):
        width = min(each.size, other.size)
        assert each.ids[:width] == other.ids[:width]


def test_without_labels_nothing_is_ranked_anew(retriever, splits):
    bare = Retriever(
        retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids, depth=50
    )
    parts = []
    for part in (splits.tuning, splits.calibration):
        found = bare.search(part.images)
        relevant = splits.gallery.labels[found.positions] == part.labels[:, None]
        parts.append(LabelledResults.of(found, relevant, np.full(len(relevant), 300)))
    with pytest.raises(InvalidData, match=r"reranked sizes need candidates with keys \(labels\)"):
        bare.calibrate(*parts, "reranked")


def test_one_query_and_a_list_of_it_get_the_same_answer(retriever, splits, tmp_path):
    image = splits.test.images[3]
    Image.fromarray(image).save(tmp_path / "query.png")
    alone = retriever.retrieve(image, 0.3, 0.1)
    forms = [image, Image.fromarray(image), tmp_path / "query.png", str(tmp_path / "query.png")]
    for form in forms:
        assert same(retriever.retrieve(form, 0.3, 0.1), alone)
    listed = retriever.retrieve(forms, 0.3, 0.1)
    assert len(listed) == 4
    assert [answer.ids for answer in listed] == [alone.ids] * 4
    assert [type(answers) for answers in (listed, retriever.retrieve((image,), 0.3, 0.1))] == [
        list,
        list,
    ]


def test_less_risk_needs_sets_that_hold_the_others(retriever, splits):
    queries = list(splits.test.images[:10])
    for strict, lenient in zip(
        retriever.retrieve(queries, 0.2, 0.1), retriever.retrieve(queries, 0.5, 0.1), strict=True
    ):
        assert strict.ids[: lenient.size] == lenient.ids
        assert strict.size > lenient.size


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (0.1, 1.0), (float("nan"), 0.1)])
def test_invalid_levels_are_refused(retriever, splits, alpha, delta):
    with pytest.raises(InvalidRiskLevel):
        retriever.retrieve(splits.test.images[0], alpha, delta)


@pytest.mark.parametrize("query", [[], (), "no-such-file.png", np.zeros((8, 16)), None])
def test_queries_that_are_no_images_are_refused(retriever, query):
    with pytest.raises(InvalidImage, match="give"):
        retriever.retrieve(query, 0.3, 0.1)


def test_no_answer_without_calibration_but_neighbours(retriever, splits):
    fresh = Retriever(
        retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids
    )
    with pytest.raises(StaleCalibration, match=r"not calibrated.*python -m calibration.*`search`"):
        fresh.retrieve(splits.test.images[0], 0.3, 0.1)
    assert fresh.search(splits.test.images[:2]).positions.shape == (2, 200)


def test_queries_searched_before_a_change_calibrate_nothing(folder, splits):
    retriever = load(folder)
    others, old = (
        retriever.search_labelled(splits.tuning),
        retriever.search_labelled(splits.calibration),
    )
    retriever.calibrate(others, old, "constant")
    retriever.add(splits.test.images[:3], ["a", "b", "c"], [1, 2, 3])
    more, new = (
        retriever.search_labelled(splits.tuning),
        retriever.search_labelled(splits.calibration),
    )
    for queries in ((others, old), (others, new), (more, old)):
        with pytest.raises(StaleCalibration, match="search them again"):
            retriever.calibrate(*queries, "constant")
    retriever.calibrate(more, new, "constant")
    retriever.max_depth = 20
    with pytest.raises(StaleCalibration, match="search them again"):
        retriever.calibrate(more, new, "constant")


@pytest.mark.parametrize("copied", [False, True])
def test_the_calibration_queries_cannot_choose_the_sizes(folder, splits, copied):
    retriever = load(folder)
    queries = retriever.search_labelled(splits.calibration)
    others = replace(queries) if copied else queries
    with pytest.raises(InvalidData, match="are the same: the guarantee needs others"):
        retriever.calibrate(others, queries)


def test_a_replaced_layer_and_names_cannot_change_unnoticed(folder, splits):
    retriever = load(folder)
    with pytest.raises(ValueError, match="read-only"):
        retriever.ids[0] = "other"
    with pytest.raises(ValueError, match="read-only"):
        retriever.labels[0] = 3
    before = retriever.encoder.fingerprint()
    retriever.encoder.network.backbone[1] = torch.nn.Tanh()
    assert retriever.encoder.fingerprint() != before


def test_adding_images_makes_the_calibration_stale_until_it_is_redone(folder, splits):
    retriever, query = load(folder), splits.test.images[0]
    assert "new" not in retriever.retrieve(query, 0.3, 0.1).ids
    retriever.add([query], ["new"], [7])
    for current in (retriever, load(save(retriever, folder.parent / "added"))):
        with pytest.raises(StaleCalibration, match="gallery, index"):
            current.retrieve(query, 0.3, 0.1)
        found = current.search([query])
        assert current.ids[found.positions[0, 0]] == "new"
        assert found.distances[0, 0] == pytest.approx(0, abs=1e-6)
        assert current.labels.tolist() == [*splits.gallery.labels.tolist(), 7]
        parts = []
        for images in (splits.tuning.images[:50], splits.calibration.images[:50]):
            again = current.search(images)
            parts.append(
                LabelledResults.of(again, np.ones(again.positions.shape, bool), np.full(50, 301))
            )
        current.calibrate(*parts, "constant")
        assert current.retrieve(query, 0.3, 0.1).ids == ("new",)


def test_changed_weights_make_the_calibration_stale(folder, splits):
    retriever = load(folder)
    with torch.no_grad():
        next(retriever.encoder.parameters()).mul_(1.001)
    changed = load(save(retriever, folder))
    with pytest.raises(StaleCalibration, match="changed since calibration: encoder"):
        changed.retrieve(splits.test.images[0], 0.3, 0.1)


@pytest.mark.parametrize(
    ("images", "ids", "labels", "error"),
    [
        (2, ["a"], [1, 1], InvalidData),
        (2, ["a", "b"], [1], InvalidData),
        (2, ["a", "b"], None, InvalidData),
        (0, [], [], InvalidImage),
        (1, ["a"], ["seven"], ValueError),
        (1, ["a"], [[1]], ValueError),
    ],
    ids=str,
)
def test_what_cannot_be_added_changes_nothing(folder, splits, images, ids, labels, error):
    retriever, query = load(folder), splits.test.images[0]
    before = retriever.retrieve(query, 0.3, 0.1)
    with pytest.raises(error):
        retriever.add(list(splits.test.images[:images]), ids, labels)
    with pytest.raises(InvalidImage):
        retriever.add([np.zeros((3,), np.uint8)], ["a"], [1])
    assert (len(retriever.index), len(retriever.ids), len(retriever.labels)) == (300, 300, 300)
    assert same(retriever.retrieve(query, 0.3, 0.1), before)


def test_a_diverged_encoder_is_refused(folder, splits):
    retriever = load(folder)
    with torch.no_grad():
        next(retriever.encoder.parameters()).fill_(torch.nan)
    with pytest.raises(InvalidData, match="NaN"):
        retriever.search(splits.test.images[:2])
    with pytest.raises(InvalidData, match="NaN"):
        Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery)


def test_an_empty_gallery_and_an_empty_search_are_refused(retriever, splits):
    with pytest.raises(InvalidData, match="at least one image"):
        Retriever.build(
            retriever.encoder, retriever.preprocessing, splits.gallery.subset(np.arange(0))
        )
    with pytest.raises(InvalidConfig, match="at least 1 candidate"):
        Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery, depth=0)


def test_a_change_in_memory_makes_the_calibration_stale(folder, splits):
    image = splits.test.images[0]

    def weights(loaded):
        with torch.no_grad():
            next(loaded.encoder.parameters()).add_(1e-3)

    def preprocessing(loaded):
        loaded.preprocessing = replace(loaded.preprocessing, mean=(0.5,))

    def depth(loaded):
        loaded.max_depth = 10

    def precision(loaded):  # there and back: rounded weights in other memory
        loaded.encoder.bfloat16().float()

    def memory(loaded):
        values = next(loaded.encoder.parameters())
        values.data = values.data * 1.001

    def hook(loaded):
        loaded.encoder.network.register_forward_hook(lambda _module, _inputs, output: output + 1)

    def hook_before(loaded):
        loaded.encoder.network.register_forward_pre_hook(lambda _module, inputs: (inputs[0] / 2,))

    for change, named in (
        (weights, "encoder"),
        (precision, "encoder"),
        (memory, "encoder"),
        (hook, "encoder"),
        (hook_before, "encoder"),
        (preprocessing, "preprocessing"),
        (depth, "search depth"),
    ):
        loaded = load(folder)
        loaded.retrieve(image, 0.3, 0.1)
        change(loaded)
        with pytest.raises(StaleCalibration, match=f"changed since calibration: {named}"):
            loaded.retrieve(image, 0.3, 0.1)


def test_a_hook_that_is_removed_leaves_the_calibration_as_it_was(folder, splits):
    retriever, image = load(folder), splits.test.images[0]
    before = retriever.retrieve(image, 0.3, 0.1)
    handle = retriever.encoder.network.register_forward_hook(lambda *_: None)
    with pytest.raises(StaleCalibration, match="changed since calibration: encoder"):
        retriever.retrieve(image, 0.3, 0.1)
    handle.remove()
    assert same(retriever.retrieve(image, 0.3, 0.1), before)


def test_a_score_function_that_was_edited_makes_the_calibration_stale(folder, splits):
    retriever, image = load(folder), splits.test.images[0]
    retriever.calibrate(
        retriever.search_labelled(splits.tuning),
        retriever.search_labelled(splits.calibration),
        "learned",
    )
    controller = retriever.controllers[None]
    for one in (controller, controller.own["recall"]):
        before, kept = retriever.retrieve(image, 0.3, 0.1), one.score_function.weights.copy()
        one.score_function.weights[0] += 1e-6
        for options in ({}, {"risk": "recall"}):
            with pytest.raises(StaleCalibration, match="changed since calibration: score function"):
                retriever.retrieve(image, 0.95, 0.1, **options)
        one.score_function.weights[:] = kept
        assert same(retriever.retrieve(image, 0.3, 0.1), before)


def test_a_gallery_that_grows_is_searched_as_deep_as_was_asked(splits):
    encoder = build_encoder(EncoderConfig("deterministic"), 1, (8, 16))
    small = Retriever.build(encoder, Preprocessing(), splits.gallery.subset(np.arange(5)), depth=20)
    assert small.depth == 5
    extra = splits.gallery.subset(np.arange(5, 60))
    small.add(extra.images, extra.ids, extra.labels)
    assert small.search(splits.test.images[:2]).positions.shape == (2, 20)
