"""The sets that `retrieve` and `at_levels` return, compared with brute force."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binom

from rcir.data import ImageSet, Preprocessing
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, InvalidImage, InvalidRiskLevel, RiskUnattainable
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.retriever import Retriever
from rcir.risk import SCORE_FUNCTIONS, Certificate, Guarantee, make_request
from tests.retrieval.retrievers import (
    build,
    calibrate,
    guarantee,
    missed,
    name_case,
    plain,
    retrieve,
)
from tests.retrieval.whole_numbers import CALIBRATION, DELTA, GALLERY, TEST


def positions(answer):
    return [int(name) for name in answer.ids]


def test_an_answer_is_the_start_of_the_brute_force_ranking(certified):
    answers = retrieve(certified, 0.3)
    for row, answer in enumerate(answers):
        size = 1 + int(1.001 * answer.guarantee.threshold * TEST.scale[row] + 1e-6)
        order = TEST.order[row, : min(150, size)]
        assert positions(answer) == order.tolist()
        assert list(answer.labels) == GALLERY.labels[order].tolist()
        distances = np.linalg.norm(GALLERY.vectors[order] - TEST.vectors[row], axis=1)
        np.testing.assert_allclose(answer.distances, distances, rtol=1e-6)
        assert answer.uncertainty == TEST.uncertainty[row]
    assert len({answer.size for answer in answers}) > 10


def test_an_answer_to_an_image_is_the_start_of_the_brute_force_ranking(retriever, splits):
    queries = splits.test.images[:20]

    def vectors(images):
        return retriever.embed(images).vectors.double().numpy()

    gallery = vectors(splits.gallery.images)
    answers = retriever.retrieve(list(queries), 0.3, 0.1)
    for query, answer in zip(vectors(queries), answers, strict=True):
        distances = np.linalg.norm(gallery - query, axis=1)
        rows = [splits.gallery.ids.index(name) for name in answer.ids]
        nearest = np.sort(distances)[: answer.size]
        np.testing.assert_allclose(answer.distances, nearest, atol=1e-4)
        np.testing.assert_allclose(distances[rows], nearest, atol=1e-4)
        assert list(answer.labels) == splits.gallery.labels[rows].tolist()


@pytest.mark.parametrize("score_function", SCORE_FUNCTIONS)
def test_every_score_function_misses_as_many_calibration_queries_as_the_bound_allows(
    score_function,
):
    retriever = calibrate(build(depth=40), score_function, groups=False)
    # P(Binomial(400, .3) <= 107) = .085, P(Binomial(400, .3) <= 108) = .104
    assert binom.cdf(107, 400, 0.3) <= DELTA < binom.cdf(108, 400, 0.3)
    for distinct in (None, "label"):
        answers = retrieve(retriever, 0.3, part=CALIBRATION, distinct=distinct)
        number = missed(answers, CALIBRATION).sum()
        # Equal sizes have many ties.
        assert (60 if score_function == "constant" else 100) < number <= 107
        assert answers[0].guarantee.n_calibration == 400
        assert answers[0].guarantee.risk_bound <= 0.3
    with pytest.raises(RiskUnattainable):
        guarantee(retriever, 1e-4)


def test_a_lower_risk_needs_sets_that_contain_those_of_a_higher_risk(certified):
    for strict, lenient in zip(retrieve(certified, 0.2), retrieve(certified, 0.5), strict=True):
        assert strict.ids[: lenient.size] == lenient.ids
        assert strict.size >= lenient.size


@pytest.fixture(scope="module")
def by_label_model():
    """Sets that take the likeliest label first."""
    return calibrate(build(), "auto", groups=False)


def test_items_of_a_label_model_keep_their_label_and_distance(by_label_model):
    answers = retrieve(by_label_model, 0.1)
    for row, answer in enumerate(answers):
        rows = positions(answer)
        assert len(set(rows)) == answer.size
        distances = np.linalg.norm(GALLERY.vectors[rows] - TEST.vectors[row], axis=1)
        np.testing.assert_allclose(answer.distances, distances, rtol=1e-6)
        assert list(answer.labels) == GALLERY.labels[rows].tolist()
    assert sum(bool((np.diff(answer.distances) < 0).any()) for answer in answers) > 30


def test_sets_of_a_label_model_hold_the_nearest_item_of_each_label(by_label_model):
    for row, answer in enumerate(retrieve(by_label_model, 0.05)):
        candidates = GALLERY.labels[TEST.order[row]]
        nearest = {label: TEST.order[row][candidates == label][0] for label in set(candidates)}
        returned = dict(zip(answer.labels, positions(answer), strict=True))
        assert len(returned) == answer.size
        for label in returned.keys() & nearest.keys():  # others have no candidate
            assert returned[label] == nearest[label]


def test_a_lower_risk_appends_to_sets_of_a_label_model(by_label_model):
    strict, lenient = (retrieve(by_label_model, alpha) for alpha in (0.1, 0.5))
    for more, fewer in zip(strict, lenient, strict=True):
        assert more.ids[: fewer.size] == fewer.ids
    assert sum(each.size for each in strict) > sum(each.size for each in lenient)
    # Sets of labels and sets of items begin alike, with one item of each label.
    for each, other in zip(retrieve(by_label_model, 0.5, distinct="label"), lenient, strict=True):
        width = min(each.size, other.size)
        assert each.ids[:width] == other.ids[:width]


def test_a_set_of_distinct_labels_contains_the_nearest_item_of_each(certified):
    sizes = set()
    for alpha in (0.05, 0.3):
        for row, answer in enumerate(retrieve(certified, alpha, distinct="label")):
            nearest = {}
            for position in TEST.order[row].tolist():
                nearest.setdefault(GALLERY.labels[position], position)
            # Never more labels than there are among the candidates.
            assert answer.size <= len(nearest)
            assert positions(answer) == list(nearest.values())[: answer.size]
            assert list(answer.labels) == list(nearest)[: answer.size]
            assert np.isfinite(answer.distances).all()
            sizes.add(answer.size)
    assert len(sizes) > 3


def test_a_set_has_no_more_labels_than_the_candidates():
    retriever = calibrate(build(depth=12))
    most = [len(set(GALLERY.labels[order[:12]])) for order in TEST.order]
    sizes = [answer.size for answer in retrieve(retriever, 0.2, distinct="label")]
    assert all(size <= limit for size, limit in zip(sizes, most, strict=True))
    assert any(size == limit for size, limit in zip(sizes, most, strict=True))


def test_abstaining_returns_one_candidate_or_nothing(learned):
    few, many = (retrieve(learned, alpha, abstain=True) for alpha in (0.3, 0.4))
    assert {answer.size for answer in few} == {0, 1}
    for row, answer in enumerate(few):
        assert answer.abstained == (answer.size == 0)
        assert set(positions(answer)) <= set(TEST.order[row, :40])
        assert answer.guarantee.request.abstain
    # A query that is answered at a lower risk is answered at a higher one.
    assert all(a.abstained or not b.abstained for a, b in zip(few, many, strict=True))
    assert sum(answer.abstained for answer in few) > sum(answer.abstained for answer in many)


@pytest.mark.parametrize(
    ("alpha", "options"),
    [(0.3, {}), (0.3, {"distinct": "label"}), (0.8, {"abstain": True}), (0.7, {"risk": "recall"})],
    ids=name_case,
)
def test_a_batch_is_answered_as_its_queries_are_one_by_one(certified, alpha, options):
    together = retrieve(certified, alpha, **options)
    for row in range(0, len(TEST), 9):
        alone = certified.retrieve(
            TEST.vectors[row], alpha, DELTA, uncertainty=TEST.uncertainty[row], **options
        )
        assert alone.to_dict() == together[row].to_dict()


def test_more_queries_than_one_batch_get_the_answers_of_their_parts(certified):
    many = TEST + CALIBRATION + TEST
    answers = plain(retrieve(certified, 0.3, part=many))
    assert answers[:100] == answers[500:] == plain(retrieve(certified, 0.3))


def test_an_embedding_is_answered_as_its_vectors_are(certified):
    embedding = Embedding(
        torch.from_numpy(TEST.vectors), uncertainty=torch.from_numpy(TEST.uncertainty)
    )
    assert plain(certified.retrieve(embedding, 0.3, DELTA)) == plain(retrieve(certified, 0.3))


def test_all_forms_of_an_image_get_the_same_answer(retriever, splits, tmp_path):
    image = splits.test.images[3]
    Image.fromarray(image).save(tmp_path / "query.png")
    forms = [image, Image.fromarray(image), tmp_path / "query.png", str(tmp_path / "query.png")]
    alone = [retriever.retrieve(form, 0.3, 0.1).to_dict() for form in forms]
    assert alone == [alone[0]] * 4
    for several in (forms, (image,), retriever.embed([image])):
        answers = retriever.retrieve(several, 0.3, 0.1)
        assert isinstance(answers, list)
        for answer in answers:  # in another batch, equally near items may swap
            np.testing.assert_allclose(answer.distances, alone[0]["distances"], atol=1e-4)


@pytest.mark.parametrize(
    "query", ["no-such-file.png", np.zeros((8, 16)), np.zeros((8, 16), np.float32), None]
)
def test_queries_that_are_not_images_are_refused(retriever, query):
    with pytest.raises(InvalidImage, match=r"give|pass"):
        retriever.retrieve(query, 0.3, 0.1)


@pytest.mark.parametrize(
    ("query", "error", "word"),
    [
        (np.zeros(5), InvalidData, "expected"),
        (np.zeros((8, 16), np.uint8), InvalidData, "expected"),
        ("picture.png", InvalidConfig, "encoder"),
        (["picture.png"], InvalidConfig, "encoder"),
    ],
    ids=name_case,
)
def test_queries_that_are_not_vectors_are_refused(query, error, word):
    retriever = build(uncertainty=None)
    retriever.calibrate(CALIBRATION.vectors, CALIBRATION.labels, "constant")
    with pytest.raises(error, match=word):
        retriever.retrieve(query, 0.3, 0.1)


ALPHAS = (0.7, 0.5, 0.95, 0.6)


@pytest.mark.parametrize(
    "options",
    [{}, {"distinct": "label"}, {"group": "hard"}, {"mix": "any"}, {"max_size": 30}],
    ids=name_case,
)
def test_at_levels_returns_the_sets_of_each_level(certified, options):
    options = options | {"uncertainty": TEST.uncertainty}
    found = certified.at_levels(TEST.vectors, ALPHAS, DELTA, **options)
    assert all(one.alphas == tuple(sorted(ALPHAS)) for one in found)
    for column, alpha in enumerate(found[0].alphas):
        answers = certified.retrieve(TEST.vectors, alpha, DELTA, simultaneous=True, **options)
        assert [one.sizes[column] for one in found] == [answer.size for answer in answers]
        for one, answer in zip(found, answers, strict=True):
            assert one.largest.ids[: answer.size] == answer.ids
            assert one.match_probabilities[column] == answer.match_probability
            if alpha == 0.5:  # the others are fitted to items of smaller sets
                likely = one.largest.probabilities
                np.testing.assert_array_equal(likely, answer.probabilities)
    assert {one.largest.guarantee.alpha for one in found} == {0.5}


def test_at_levels_leaves_out_unattainable_levels_and_refuses_invalid_ones(retriever, splits):
    image = [splits.test.images[0]]
    (found,) = retriever.at_levels(image, [1e-6, 0.95], 0.1)
    assert found.alphas == (0.95,)
    for alphas, error in (
        ([1e-6], RiskUnattainable),
        ([], InvalidRiskLevel),
        ([2], InvalidRiskLevel),
    ):
        with pytest.raises(error):
            retriever.at_levels(image, alphas, 0.1)
    for options in ({"simultaneous": False}, {"anytime": True}, {"risk": "recall"}, {"k": 1}):
        with pytest.raises(InvalidConfig):
            retriever.at_levels(image, [0.95], 0.1, **options)


# Names of labels


@pytest.fixture(scope="module")
def people(retriever, splits):
    """A calibrated gallery whose labels have names."""
    names = np.array([f"person {number}" for number in range(100)])[splits.gallery.labels]
    gallery = replace(splits.gallery, attributes=splits.gallery.attributes | {"class": names})
    built = Retriever.build(retriever.encoder, Preprocessing(), gallery, depth=150)
    parts = built.search_labelled(splits.tuning), built.search_labelled(splits.calibration)
    built.calibrate_splits(*parts, "constant")
    return built


@pytest.mark.parametrize("distinct", [None, "label"])
def test_answers_name_labels_as_the_data_set_does(people, splits, tmp_path, distinct):
    loaded = Retriever.load(people.save(tmp_path / "people"))
    for one in (people, loaded):
        for answer in one.retrieve(list(splits.test.images[:3]), 0.3, 0.2, distinct=distinct):
            # An id of this data set ends in the number in the image.
            expected = [f"person {int(name[-2:])}" for name in answer.ids]
            assert len(expected) > 1
            assert list(answer.labels) == expected
            assert json.loads(json.dumps(answer.to_dict()))["labels"] == expected
            assert all(name in str(answer) for name in expected)


def test_names_of_labels_change_no_fingerprint(people, retriever):
    assert people.searcher.fingerprints()["gallery"] == retriever.searcher.fingerprints()["gallery"]


@pytest.mark.filterwarnings("ignore:.*labels of the gallery")
def test_a_new_label_without_a_name_is_its_number_as_text(people, splits, tmp_path):
    larger = Retriever.load(people.save(tmp_path / "people"))
    larger.add(splits.test.images[:1], ["new"], [777])
    parts = larger.search_labelled(splits.tuning), larger.search_labelled(splits.calibration)
    larger.calibrate_splits(*parts, "constant")
    answer = larger.retrieve(splits.test.images[0], 0.3, 0.2)
    names = dict(zip(answer.ids, answer.labels, strict=True))
    assert names.pop("new") == "777"
    assert all(label == f"person {int(name[-2:])}" for name, label in names.items())


@pytest.mark.parametrize("names", ["abc", "aaa"], ids=["two of one", "one of two"])
def test_names_that_are_not_one_to_one_are_ignored(names):
    images, labels = np.zeros((3, 2, 2), np.uint8), np.array([0, 0, 1])
    named = ImageSet(images, labels, list("abc"), {"class": np.array(list(names))})
    assert named.label_names == {}


# What an answer and its guarantee say

GUARANTEE = Guarantee(
    make_request(0.05, 0.1),
    Certificate(12.5, "binomial", risk_bound=0.0498),
    score_function="quantile",
    n_calibration=3000,
)


def changed(**changes):
    """The guarantee with other values of its request, of its certificate, or of its own."""
    certificate, keywords = GUARANTEE.certificate, GUARANTEE.request.to_keywords()
    of_certificate, of_request = (
        {name: changes.pop(name) for name in names & changes.keys()}
        for names in (vars(certificate).keys(), keywords.keys())
    )
    return replace(
        GUARANTEE,
        request=make_request(**keywords | of_request),
        certificate=replace(certificate, **of_certificate),
        **changes,
    )


def retrieval(labels=(4, 7)):
    distances = np.array([0.25, 1.5], np.float32)
    probabilities = np.array([0.75, 0.0004])
    return Retrieval(
        ("near", "far"), distances, probabilities, 0.998, 0.125, 0.4, -0.25, GUARANTEE, labels
    )


def test_the_text_of_an_answer_lists_the_items_in_order():
    head, _, *rows, guarantee = str(retrieval()).splitlines()
    assert head.startswith("2 images, holds a match with probability >0.99")
    assert " ".join(rows).split() == ["1", "0.2500", "0.75", "near", "2", "1.5000", "<0.01", "far"]
    assert guarantee == str(GUARANTEE)


@pytest.mark.parametrize("labels", [(4, 7), None])
def test_an_answer_survives_json(labels):
    values = json.loads(json.dumps(retrieval(labels).to_dict()))
    assert values.pop("guarantee") == GUARANTEE.to_dict()
    assert values == {
        "ids": ["near", "far"],
        "label_calibrated": None,
        "distances": [0.25, 1.5],
        "probabilities": [0.75, 0.0004],
        "match_probability": 0.998,
        "labels": None if labels is None else [4, 7],
        "size": 2,
        "uncertainty": 0.125,
        "unlike": 0.4,
        "abstained": False,
    }


def test_an_abstention_says_so_in_print_and_in_json():
    guarantee = changed(abstain=True, threshold=0.0, selection_threshold=0.25)
    none = Retrieval((), np.zeros(0, np.float32), np.zeros(0), None, 3.5, 0.01, -2.0, guarantee, ())
    assert none.abstained
    assert str(none).startswith("no answer")
    values = json.loads(json.dumps(none.to_dict()))
    assert (values["probabilities"], values["match_probability"]) == ([], None)
    assert (values["ids"], values["size"], values["abstained"]) == ([], 0, True)
    assert "selection score of 0.25" in str(guarantee)
    assert "threshold" not in str(guarantee)


@pytest.mark.parametrize(
    ("ids", "distances", "labels"), [(("a",), 2, None), (("a", "b"), 2, (1,)), ((), 1, None)]
)
def test_parts_of_an_answer_of_different_length_are_refused(ids, distances, labels):
    with pytest.raises(ValueError, match="ids"):
        Retrieval(
            ids,
            np.zeros(distances, np.float32),
            np.ones(len(ids)),
            0.5,
            0.1,
            1,
            -0.25,
            GUARANTEE,
            labels,
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "0.9 0.05 missing 3000 quantile binomial 12.5"),
        ({"distinct": "label"}, "labels"),
        ({"risk": "recall", "delta": 0.001}, "0.999 0.05 matches"),
        ({"risk": "recall", "distinct": "label"}, "0.05 labels"),
        ({"risk": "false-discovery"}, "0.05 wrong items"),
        ({"risk": "false-discovery", "distinct": "label"}, "0.05 wrong labels"),
        (
            {"alpha": {"miss": 0.1, "recall": 0.25, "false-discovery": 0.5}, "risk_bound": None},
            "0.1 missing 0.25 matches 0.5 wrong",
        ),
        ({"abstain": True}, "0.05 answers"),
        ({"simultaneous": True}, "whatever"),
        ({"chosen_among": 12}, "12"),
        ({"delta": None}, "average"),
        ({"anytime": True}, "every"),
        ({"mix": "any", "n_groups": 5}, "5 groups"),
        ({"mix": {"north": 0.7, "south": 0.3}}, "north 0.7 south 0.3"),
        ({"cluster": "drawer", "n_clusters": 60}, "drawer 60 3000"),
        (
            {"cluster": "drawer", "n_clusters": 20, "group": "north", "n_calibration": 70},
            "north drawer 20 70",
        ),
        # Never rounded in favour of the guarantee.
        ({"delta": 1e-12}, "0.999999999999"),
        ({"delta": 0.10004, "alpha": 0.12344}, "0.89996 0.12344"),
    ],
    ids=name_case,
)
def test_the_sentence_states_what_was_requested(changes, words):
    guarantee = changed(**changes)
    assert set(words.split()) <= set(re.findall(r"\w(?:[\w.-]*\w)?", str(guarantee)))
    values = json.loads(json.dumps(guarantee.to_dict()))
    assert all(values[name] == changes[name] for name in changes)
