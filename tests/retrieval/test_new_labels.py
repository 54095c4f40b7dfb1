"""Queries of labels that did not calibrate, and tuning on the items of the gallery."""

import warnings

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.tuning import CalibrationOptions, search_items, why_gallery_cannot_tune
from rcir.risk import GuaranteeRequest, LabelledResults
from tests.retrieval.retrievers import build, plain
from tests.retrieval.whole_numbers import CALIBRATION, GALLERY, TEST, TUNING

LABELS, ITEMS, DIM, SPREAD = 60, 12, 8, 0.45
KNOWN = 30  # labels that have calibration queries


def draw(labels, seed):
    """Return vectors around the centre of each label, some of which are harder than others."""
    centres = np.random.default_rng(0).standard_normal((LABELS + 20, DIM))
    spread = SPREAD * np.exp(np.random.default_rng(1).normal(0, 0.3, LABELS + 20))
    noise = np.random.default_rng(seed).standard_normal((len(labels), DIM))
    return (centres[labels] + spread[labels, None] * noise).astype(np.float32)


GALLERY_LABELS = np.repeat(np.arange(LABELS), ITEMS)
QUERY_LABELS = np.repeat(np.arange(KNOWN), 20)
NEW_LABELS = np.repeat(np.arange(KNOWN, LABELS), 20)


def made(rows=slice(None), **options):
    retriever = rcir.Retriever.from_embeddings(draw(GALLERY_LABELS, 2), labels=GALLERY_LABELS)
    labels = QUERY_LABELS[rows]
    report = retriever.calibrate(draw(QUERY_LABELS, 3)[rows], labels, **options)
    return retriever, report


@pytest.fixture(scope="module")
def both():
    """A retriever with rules tuned on queries, and others on the gallery; and its report."""
    return made()


def test_new_labels_are_served_by_rules_of_the_gallery_and_counted(both, tmp_path):
    retriever, report = both
    loaded = rcir.load(retriever.save(tmp_path / "saved"))
    new = draw(NEW_LABELS, 4)
    for request in ({"alpha": 0.2}, {"alpha": {"miss": 0.3, "false-discovery": 0.6}}):
        for query_labels in ("new", "any"):
            options = request | {"delta": 0.1, "query_labels": query_labels, "distinct": "label"}
            guarantee = retriever.guarantee(**options)
            assert (guarantee.n_labels, guarantee.query_labels) == (KNOWN, query_labels)
            assert f"any further label like the {KNOWN} that calibrated" in str(guarantee)
            again = loaded.retrieve(new[:30], **options)
            assert plain(again) == plain(retriever.retrieve(new[:30], **options))
    assert "of the same 30 labels" in str(retriever.guarantee(0.2, 0.1))
    assert report.coverage.uncovered == LABELS - KNOWN
    sizes = [row.new_labels_size for row in report.rows]
    assert sizes[-1] > report.rows[-1].mean_size


def test_nothing_is_tuned_on_queries_that_calibrate():
    """The same gallery gives the same rules, whichever queries calibrate."""
    states = []
    for rows in (slice(0, 300), slice(300, None)):
        retriever, report = made(rows, tuning="gallery")
        calibration = retriever.require_calibration()
        rule = calibration.rules["label"].main
        states.append((calibration.uncertainty, rule.score_function.state(), rule.tuning.scores))
        assert (report.n_calibration, report.tuned_on_gallery) == (300, True)
    np.testing.assert_equal(*states)


def test_few_queries_all_calibrate():
    rows = np.arange(0, len(QUERY_LABELS), 30)[: 22 - 2]
    rows = np.concatenate([rows, [1, 2]])
    retriever, report = made(rows)
    assert report.n_calibration == 22
    assert retriever.guarantee(0.1, 0.1, distinct="label").n_calibration == 22


def test_items_are_searched_without_themselves_and_their_copies():
    vectors = np.concatenate([GALLERY.vectors, GALLERY.vectors[:2]])
    labels = np.append(GALLERY.labels, GALLERY.labels[:2])
    searcher = rcir.Retriever.from_embeddings(
        vectors, labels=labels, metric="euclidean", depth=len(vectors)
    ).searcher
    queries = searcher.search_labelled(searcher.labelled(TEST.vectors, TEST.labels))
    items = search_items(searcher, queries)
    assert isinstance(items, LabelledResults)
    apart = np.abs(items.results.vectors[:, None, 0] - vectors[None, :, 0])
    for row in range(0, len(items), 17):
        expected = np.sort(apart[row][apart[row] > 0])
        found = items.results.distances[row]
        np.testing.assert_allclose(found[np.isfinite(found)], expected)
        assert items.results.positions[row].min() == -1
        same = np.count_nonzero((labels == items.query_labels[row]) & (apart[row] > 0))
        assert items.n_relevant[row] == items.relevant[row].sum() == same


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"labels": [f"kind {n}" for n in range(len(GALLERY.labels))]}, "one item"),
        ({"labels": None}, "single label"),
        ({"leave_one_out": True}, "leave_one_out"),
        ({"uncertainty": None}, "uncertainties"),
    ],
)
def test_some_galleries_cannot_tune(options, reason):
    searcher = build(**options).searcher
    queries = searcher.prepared(TEST.vectors, None, TEST.uncertainty)
    assert reason in why_gallery_cannot_tune(searcher, queries, CalibrationOptions())


def test_new_labels_need_rules_that_were_tuned_on_other_labels():
    """One item of each label: items cannot tune, and queries are divided at random or by label."""
    labels = np.arange(LABELS)
    retriever = rcir.Retriever.from_embeddings(draw(labels, 2), labels=labels)
    queries = np.repeat(labels, 12)
    retriever.calibrate(draw(queries, 3), queries)
    with pytest.raises(InvalidConfig, match="tuning"):
        retriever.guarantee(0.3, 0.1, query_labels="new")
    with pytest.raises(InvalidConfig, match="cannot tune"):
        retriever.calibrate(draw(queries, 3), queries, tuning="gallery")
    report = retriever.calibrate(draw(queries, 3), queries, tuning="labels")
    assert retriever.guarantee(0.3, 0.1, query_labels="new").n_labels == 42
    assert report.coverage.uncovered == 18  # three tenths of the labels tuned


def test_too_few_labels_are_refused_with_their_number():
    retriever, _ = made(slice(0, 200), tuning="gallery")  # 10 labels
    with pytest.raises(RiskUnattainable, match="more labels") as caught:
        retriever.guarantee(0.1, 0.1, query_labels="new")
    assert caught.value.minimum_alpha > 0.1
    assert retriever.guarantee(caught.value.minimum_alpha, 0.1, query_labels="new").n_labels == 10


def test_impossible_combinations_are_refused(both):
    for options in ({"simultaneous": True}, {"anytime": True}, {"abstain": True}):
        with pytest.raises(InvalidConfig, match="independent"):
            GuaranteeRequest(0.2, 0.1, query_labels="any", **options)
    with pytest.raises(InvalidConfig, match="query_labels"):
        GuaranteeRequest(0.2, 0.1, query_labels="old")
    with pytest.raises(InvalidData, match="choose"):
        made(clusters=[str(n) for n in range(len(QUERY_LABELS))], tuning="labels")
    clustered, _ = made(clusters=[f"{n // 4}" for n in range(len(QUERY_LABELS))])
    with pytest.raises(InvalidConfig, match="clusters"):
        clustered.guarantee(0.2, 0.1, query_labels="new")


def test_groups_are_served_among_new_labels():
    retriever, _ = made(groups=np.tile(["a", "b"], len(QUERY_LABELS) // 2))
    thresholds = {
        (query_labels, name): retriever.guarantee(
            0.3, 0.1, risk="recall", query_labels=query_labels, **options
        ).threshold
        for query_labels in ("new", "any")
        for name, options in {"all": {}, "a": {"group": "a"}, "mix": {"mix": "any"}}.items()
    }
    for name in ("all", "a", "mix"):
        assert thresholds["any", name] >= thresholds["new", name]
    assert thresholds["new", "mix"] > thresholds["new", "all"]
    wrong = retriever.guarantee(0.7, 0.1, risk="false-discovery", query_labels="any", group="a")
    assert (wrong.n_calibration, wrong.n_labels) == (
        retriever.guarantee(0.3, 0.1, group="a").n_calibration,
        KNOWN,
    )


def test_a_growing_gallery_warns_and_says_which_answers_are_covered():
    retriever, _ = made(tuning="gallery")
    added = np.repeat(np.arange(LABELS, LABELS + 20), ITEMS)
    names = [f"new {n}" for n in range(len(added))]
    with pytest.warns(UserWarning, match="50 of 80 labels"):
        retriever.add(draw(added, 5), names, added)
    with pytest.warns(UserWarning, match="50 of 80 labels"):
        retriever.recalibrate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        retriever.recalibrate()  # no smaller share than before
        retriever.remove(names)
    answers = {
        name: retriever.retrieve(draw(labels, 6), 0.2, 0.1, distinct="label")
        for name, labels in {"old": QUERY_LABELS, "new": NEW_LABELS}.items()
        if retriever.recalibrate()
    }
    for answer in answers["old"] + answers["new"]:
        assert answer.covered == (answer.labels[0] < KNOWN)
    assert np.mean([one.covered for one in answers["old"]]) > 0.9
    assert np.mean([one.covered for one in answers["new"]]) < 0.3
    assert plain(answers["old"])[0]["covered"] in (True, False)


def test_the_calibration_and_tuning_splits_of_whole_numbers_are_still_apart():
    retriever = build()
    splits = [
        retriever.search_labelled(retriever.labelled(part.vectors, part.labels, part.uncertainty))
        for part in (TUNING, CALIBRATION)
    ]
    retriever.calibrate_splits(*splits)
    calibration = retriever.require_calibration()
    assert len(calibration.tuning_queries) == len(TUNING)
    assert len(calibration.on_gallery.tuning_queries) == 0
    assert (
        calibration.on_gallery.main.calibration.query_labels.tolist() == CALIBRATION.labels.tolist()
    )
