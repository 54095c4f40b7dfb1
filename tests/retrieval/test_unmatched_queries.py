"""Calibration queries without a match in the gallery."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

import rcir
from rcir.cli import main
from rcir.data import WithinRadius
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, naming_flags
from rcir.retrieval.rules import RuleKind, Rules
from rcir.risk import make_request

N_GALLERY, N_QUERIES, DIM = 300, 400, 8
LABELS = np.random.default_rng(0).integers(5, size=N_GALLERY + N_QUERIES)
CENTRES = np.random.default_rng(1).normal(size=(5, DIM))
VECTORS = CENTRES[LABELS] + 0.3 * np.random.default_rng(2).normal(size=(len(LABELS), DIM))
PLACES = np.random.default_rng(3).uniform(size=(len(LABELS), 2))
GALLERY, QUERIES = slice(N_GALLERY), slice(N_GALLERY, None)
FEW, MANY = np.arange(N_QUERIES) % 10 < 3, np.arange(N_QUERIES) % 10 < 7  # 30%, 70%


def build(labels):
    return rcir.Retriever.from_embeddings(VECTORS[GALLERY], labels=labels)


def named(prefix, labels):
    return [f"{prefix}{label}" for label in labels]


# For each kind of relevance: labels of the gallery, of queries that match, of queries that do not.
KINDS = {
    "numbers": (LABELS[GALLERY], LABELS[QUERIES], LABELS[QUERIES] + 100),
    "texts": (
        named("", LABELS[GALLERY]),
        named("", LABELS[QUERIES]),
        named("class ", LABELS[QUERIES]),
    ),
    "shared labels": (
        [[name, "x"] for name in named("", LABELS[GALLERY])],
        [[name] for name in named("", LABELS[QUERIES])],
        [[name] for name in named("other ", LABELS[QUERIES])],
    ),
    "table": (None, [["7"]] * N_QUERIES, [[]] * N_QUERIES),
    "places": (
        WithinRadius(PLACES[GALLERY], 0.2),
        WithinRadius(PLACES[QUERIES], 0.2),
        WithinRadius(PLACES[QUERIES] + 50, 0.2),
    ),
}


def mixed(matching, others, rows):
    """Return labels of which some rows match."""
    if isinstance(matching, WithinRadius):
        places = np.where(rows[:, None], matching.places, others.places)
        return WithinRadius(places, matching.radius)
    pairs = zip(rows, matching, others, strict=True)
    labels = [one if matches else other for matches, one, other in pairs]
    return np.array(labels) if isinstance(matching, np.ndarray) else labels


@pytest.mark.parametrize("kind", KINDS)
def test_queries_without_any_match_are_refused_before_anything_is_fitted(kind, monkeypatch):
    gallery, _, others = KINDS[kind]
    retriever = build(gallery)
    monkeypatch.setattr("rcir.retrieval.calibrate.choose_uncertainty", None)  # the first fit
    with pytest.raises(InvalidData, match="none of the"):
        retriever.calibrate(VECTORS[QUERIES], others)
    assert retriever.calibration is None


@pytest.mark.parametrize("kind", KINDS)
def test_most_queries_without_a_match_cause_a_warning(kind):
    gallery, matching, others = KINDS[kind]
    with pytest.warns(UserWarning, match="have no match in the gallery") as caught:
        build(gallery).calibrate(VECTORS[QUERIES], mixed(matching, others, FEW), "constant")
    assert {warning.filename for warning in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*labels that no gallery item has")
        build(gallery).calibrate(VECTORS[QUERIES], mixed(matching, others, MANY), "constant")


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_a_few_queries_with_labels_that_the_gallery_lacks_cause_a_warning(kind):
    gallery, matching, others = KINDS[kind]
    labels = mixed(matching, others, np.arange(N_QUERIES) % 20 < 19)
    calibration = np.arange(N_QUERIES) >= 100
    retriever = build(gallery)
    parts = [
        retriever.search_labelled(
            retriever.labelled(VECTORS[QUERIES][rows], np.asarray(labels)[rows])
        )
        for rows in (~calibration, calibration)
    ]
    with pytest.warns(UserWarning, match="15 of 300 .*labels that no gallery item has"):
        retriever.calibrate_splits(*parts, "constant")


def test_the_refusal_shows_three_labels_of_each_side():
    gallery, _, others = KINDS["texts"]
    with pytest.raises(InvalidData) as refusal:
        build(gallery).calibrate(VECTORS[QUERIES], others)
    for label in ("'0'", "'1'", "'2'", "'class 0'", "'class 1'", "'class 2'"):
        assert label in str(refusal.value)


def test_labels_that_one_item_each_has_cannot_calibrate_by_leave_one_out():
    labels = np.arange(N_GALLERY)
    retriever = rcir.Retriever.from_embeddings(VECTORS[GALLERY], labels=labels, leave_one_out=True)
    with pytest.raises(InvalidData, match="without its own"):
        retriever.calibrate(VECTORS[GALLERY], labels)


def test_a_gallery_that_lost_all_matches_is_not_recalibrated():
    retriever = build(LABELS[GALLERY])
    retriever.calibrate(VECTORS[QUERIES], LABELS[QUERIES], "constant")
    with pytest.warns(UserWarning, match="1 of 6 labels"):
        retriever.add(VECTORS[:3] + 1, ["a", "b", "c"], np.full(3, 77))
    retriever.remove([str(row) for row in range(N_GALLERY)])
    with pytest.warns(UserWarning, match="1 of 1 labels"), pytest.raises(InvalidData, match="77"):
        retriever.recalibrate()


def test_queries_to_add_are_not_refused_and_many_cause_a_warning():
    retriever = build(LABELS[GALLERY])
    retriever.calibrate(VECTORS[QUERIES][:300], LABELS[QUERIES][:300], "constant")
    before = retriever.guarantee(0.5, 0.1, anytime=True).n_calibration
    strangers = np.full(N_QUERIES, 77)
    retriever.extend_calibration(VECTORS[QUERIES][300:302], strangers[300:302])
    with pytest.warns(UserWarning, match="have no match in the gallery"):
        retriever.extend_calibration(VECTORS[QUERIES][302:350], strangers[302:350])
    assert retriever.guarantee(0.5, 0.1, anytime=True).n_calibration == before + 50


def test_searching_deeper_is_advised_only_if_matches_are_beyond_the_candidates():
    labels = LABELS.copy()
    labels[QUERIES][::4] = 77  # a quarter matches nothing
    absent = build(labels[GALLERY])
    with pytest.warns(UserWarning, match="labels that no gallery item has"):
        absent.calibrate(VECTORS[QUERIES], labels[QUERIES], "constant")
    # The first candidate of a query is of another label where the depth is 1.
    noisy = np.random.default_rng(4).normal(size=VECTORS.shape)
    shallow = rcir.Retriever.from_embeddings(noisy[GALLERY], labels=LABELS[GALLERY], depth=1)
    shallow.calibrate(noisy[QUERIES], LABELS[QUERIES], "constant")
    for options in ({}, {"risk": "recall"}, {"distinct": "label"}, {"query_labels": "new"}):
        with pytest.raises(RiskUnattainable) as of_absent:
            absent.guarantee(0.02, 0.1, **options)
        assert "deeper" not in str(of_absent.value) or options.get("risk") == "recall"
        assert "anywhere" in str(of_absent.value)
        with pytest.raises(RiskUnattainable) as of_shallow:
            shallow.guarantee(0.02, 0.1, **options)
        assert "deeper" in str(of_shallow.value)
        assert "anywhere" not in str(of_shallow.value)


def test_larger_sets_are_advised_only_if_matches_are_beyond_the_limit():
    retriever = build(LABELS[GALLERY])
    noisy = VECTORS[QUERIES] + np.random.default_rng(5).normal(size=(N_QUERIES, DIM))
    retriever.calibrate(noisy, LABELS[QUERIES], "constant")
    with pytest.raises(RiskUnattainable, match="allow more than 1") as limited:
        retriever.guarantee(0.02, 0.1, max_size=1)
    assert "deeper" not in str(limited.value)
    retriever = build(LABELS[GALLERY])
    retriever.calibrate(VECTORS[QUERIES], LABELS[QUERIES], "constant")
    with pytest.raises(RiskUnattainable) as too_few:  # 280 queries are not enough for this alpha
        retriever.guarantee(1e-4, 0.1, max_size=100)
    assert "allow more" not in str(too_few.value)


def test_advice_names_flags_on_a_command_line_and_keywords_elsewhere():
    retriever = build(LABELS[GALLERY])
    retriever.calibrate(VECTORS[QUERIES], LABELS[QUERIES], "constant")
    rules = {RuleKind(): Rules({"miss": retriever.calibration.miss_rule})}
    calibration = replace(retriever.calibration, rules=rules)
    for context, tuning, anytime in (
        (naming_flags(), "--tuning labels", "--anytime"),
        (naming_flags(False), 'tuning="labels"', "anytime=True"),
    ):
        with context:
            with pytest.raises(InvalidConfig, match=re.escape(tuning)):
                calibration.guarantee(make_request(0.3, 0.1, query_labels="new"))
            with pytest.raises(InvalidConfig, match=re.escape(anytime)):
                make_request(0.3, 0.1, anytime=True, simultaneous=True)


def test_rcir_retrieve_names_flags(tmp_path, capsys):
    retriever = build(LABELS[GALLERY])
    retriever.calibrate(VECTORS[QUERIES], LABELS[QUERIES], "constant")
    folder = str(retriever.save(tmp_path / "saved"))
    np.save(tmp_path / "queries.npy", VECTORS[:2])
    (tmp_path / "queries.csv").write_text("id\na\nb\n")
    command = ["retrieve", str(tmp_path / "queries.npy"), "--retriever", folder]
    with pytest.raises(SystemExit):
        main([*command, "--anytime", "--simultaneous"])
    error = capsys.readouterr().err
    assert "--anytime" in error
    assert "anytime=True" not in error
