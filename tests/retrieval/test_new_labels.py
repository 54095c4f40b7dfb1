"""Queries of labels that did not calibrate, and tuning on the items of the gallery."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import rcir
from rcir.data.relevance import WithinRadius
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.rules import RuleKind
from rcir.retrieval.tuning import CalibrationOptions, search_items, why_gallery_cannot_tune
from rcir.risk import (
    LabelledResults,
    Population,
    Risk,
    ScoredResults,
    certify,
    losses,
    make_request,
)
from rcir.store.codec import encode
from tests.populations import in_population
from tests.retrieval.retrievers import build, plain
from tests.retrieval.whole_numbers import CALIBRATION, GALLERY, TEST, TUNING

LABELS, ITEMS, DIM, SPREAD = 60, 12, 8, 0.45
KNOWN = 30  # labels that have calibration queries


def draw(labels, seed):
    """Return vectors around the centre of each label, some of which are harder than others."""
    centres = np.random.default_rng(0).standard_normal((LABELS + 20, DIM))
    centres[LABELS:] = 4 + 0.1 * centres[LABELS:]  # further labels, near each other
    spread = SPREAD * np.exp(np.random.default_rng(1).normal(0, 0.3, LABELS + 20))
    noise = np.random.default_rng(seed).standard_normal((len(labels), DIM))
    return (centres[labels] + spread[labels, None] * noise).astype(np.float32)


GALLERY_LABELS = np.repeat(np.arange(LABELS), ITEMS)
QUERY_LABELS = np.repeat(np.arange(KNOWN), 20)
NEW_LABELS = np.repeat(np.arange(KNOWN, LABELS), 20)


def made(rows=slice(None), score_function="quantile", **options):
    retriever = rcir.Retriever.from_embeddings(draw(GALLERY_LABELS, 2), labels=GALLERY_LABELS)
    labels = QUERY_LABELS[rows]
    report = retriever.calibrate(draw(QUERY_LABELS, 3)[rows], labels, score_function, **options)
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
            assert (guarantee.n_labels, guarantee.request.labels) == (KNOWN, query_labels)
            assert f"any further label like the {KNOWN} that calibrated" in str(guarantee)
            again = loaded.retrieve(new[:30], **options)
            assert plain(again) == plain(retriever.retrieve(new[:30], **options))
    assert "of the same 30 labels" in str(retriever.guarantee(0.2, 0.1))
    assert report.coverage.uncalibrated == LABELS - KNOWN
    sizes = [row.new_labels_size for row in report.rows]
    assert sizes[-1] > report.rows[-1].mean_size


def test_nothing_is_tuned_on_queries_that_calibrate():
    """The same gallery gives the same rules, whichever queries calibrate."""
    states = []
    for rows in (slice(0, 300), slice(300, None)):
        retriever, report = made(rows, "auto", tuning="gallery")
        calibration = retriever.require_calibration()
        rule = calibration.rule_for(make_request(distinct="label"))
        states.append((calibration.uncertainty, encode(rule.score_function), rule.tuned.scores))
        assert (report.n_calibration, report.calibration.tuned_on_gallery) == (300, True)
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
    labelled, _ = searcher.labelled(TEST.vectors, TEST.labels)
    queries = searcher.search_labelled(labelled)
    items = search_items(searcher, queries)
    assert isinstance(items, LabelledResults)
    apart = np.abs(items.results.vectors[:, None, 0] - vectors[None, :, 0])
    for row in range(0, len(items), 17):
        expected = np.sort(apart[row][apart[row] > 0])
        found = items.results.distances[row]
        np.testing.assert_allclose(found[np.isfinite(found)], expected)
        assert items.results.positions[row].min() == -1
        same = np.count_nonzero((labels == items.population.labels[row]) & (apart[row] > 0))
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
    queries = searcher.prepare(TEST.vectors, None, TEST.uncertainty)
    assert reason in why_gallery_cannot_tune(searcher, queries, CalibrationOptions("quantile"))


def test_new_labels_need_rules_that_were_tuned_on_other_labels():
    """One item of each label: items cannot tune, and queries are divided at random or by label."""
    labels = np.arange(LABELS)
    retriever = rcir.Retriever.from_embeddings(draw(labels, 2), labels=labels)
    queries = np.repeat(labels, 12)
    retriever.calibrate(draw(queries, 3), queries, "quantile")
    with pytest.raises(InvalidConfig, match="tuning"):
        retriever.guarantee(0.3, 0.1, query_labels="new")
    with pytest.raises(InvalidConfig, match="cannot tune"):
        retriever.calibrate(draw(queries, 3), queries, "quantile", tuning="gallery")
    report = retriever.calibrate(draw(queries, 3), queries, "quantile", tuning="labels")
    assert retriever.guarantee(0.3, 0.1, query_labels="new").n_labels == 42
    assert report.coverage.uncalibrated == 18  # three tenths of the labels tuned


def test_too_few_labels_are_refused_with_their_number():
    retriever, _ = made(slice(0, 200), tuning="gallery")  # 10 labels
    with pytest.raises(RiskUnattainable, match="more labels") as caught:
        retriever.guarantee(0.1, 0.1, query_labels="new")
    assert caught.value.minimum_alpha > 0.1
    assert retriever.guarantee(caught.value.minimum_alpha, 0.1, query_labels="new").n_labels == 10


def test_impossible_combinations_are_refused(both):
    for options in ({"simultaneous": True}, {"anytime": True}, {"abstain": True}):
        with pytest.raises(InvalidConfig, match="independent"):
            make_request(0.2, 0.1, query_labels="any", **options)
    with pytest.raises(InvalidConfig, match="query_labels"):
        make_request(0.2, 0.1, query_labels="old")
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
        for name, options in {"all": {}, "a": {"group": "a"}}.items()
    }
    for name in ("all", "a"):
        assert thresholds["any", name] >= thresholds["new", name]
    with pytest.raises(InvalidConfig, match=r"labels .* several groups"):
        retriever.guarantee(0.3, 0.1, query_labels="new", mix="any")
    wrong = retriever.guarantee(0.7, 0.1, risk="false-discovery", query_labels="any", group="a")
    assert (wrong.n_calibration, wrong.n_labels) == (
        retriever.guarantee(0.3, 0.1, group="a").n_calibration,
        KNOWN,
    )
    retriever, _ = made(groups=np.where(QUERY_LABELS % 2, "a", "b"))
    guarantee = retriever.guarantee(0.5, 0.2, risk="recall", query_labels="any", mix="any")
    assert guarantee.n_groups == 2


def test_a_growing_gallery_warns_and_answers_say_which_likeliest_label_calibrated():
    rows = GALLERY_LABELS < KNOWN
    retriever = rcir.Retriever.from_embeddings(
        draw(GALLERY_LABELS, 2)[rows], labels=GALLERY_LABELS[rows]
    )
    retriever.calibrate(draw(QUERY_LABELS, 3), QUERY_LABELS, "quantile", tuning="gallery")
    added = np.repeat(np.arange(LABELS, LABELS + 20), ITEMS)
    with pytest.warns(UserWarning, match="20 of 50 labels"):
        retriever.add(draw(added, 5), [f"new {n}" for n in range(len(added))], added)
    with pytest.warns(UserWarning, match="20 of 50 labels"):
        retriever.recalibrate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        retriever.recalibrate()  # no smaller share than before
    certified = {"alpha": 0.2, "delta": 0.1, "distinct": "label"}
    old, new = (retriever.retrieve(draw(part, 6), **certified) for part in (QUERY_LABELS, added))
    assert np.mean([answer.label_calibrated for answer in old]) >= 0.95
    assert np.mean([not answer.label_calibrated for answer in new]) >= 0.95
    assert all(answer.label_calibrated == (answer.labels[0] < KNOWN) for answer in old + new)
    missed = np.mean([label not in one.labels for label, one in zip(added, new, strict=True)])
    assert missed > 0.5  # what the default does not promise
    with pytest.raises(RiskUnattainable):
        retriever.guarantee(0.05, 0.1, query_labels="any")
    any_label = retriever.retrieve(draw(added, 6), **certified, query_labels="any")
    assert {answer.guarantee.n_labels for answer in any_label} == {KNOWN}


def test_the_calibration_and_tuning_splits_of_whole_numbers_are_still_apart():
    retriever = build()
    splits = [
        retriever.search_labelled(retriever.labelled(part.vectors, part.labels, part.uncertainty))
        for part in (TUNING, CALIBRATION)
    ]
    retriever.calibrate_splits(*splits, "quantile")
    calibration = retriever.require_calibration()
    assert len(calibration.tuning_queries) == len(TUNING)
    rule = calibration.rules[RuleKind(tuned_on="gallery")]["miss"]
    assert rule is calibration.rule_for(make_request(query_labels="new"))
    assert rule.evidence.population.labels.tolist() == CALIBRATION.labels.tolist()


def test_a_choice_among_retrievers_counts_for_all_requests(tmp_path):
    retriever, _ = made()
    retriever.calibration = replace(retriever.calibration, chosen_among=4)
    retriever.recalibrate()
    loaded = rcir.load(retriever.save(tmp_path / "chosen"))
    for one in (retriever, loaded):
        for query_labels in ("calibrated", "new", "any"):
            guarantee = one.guarantee(0.4, 0.1, query_labels=query_labels)
            assert guarantee.chosen_among == 4
    new = {"alpha": 0.4, "delta": 0.1, "query_labels": "new"}
    assert loaded.guarantee(**new) == retriever.guarantee(**new)
    with pytest.raises(InvalidConfig, match="chosen"):
        retriever.guarantee(0.4, None, query_labels="new")


def test_a_saved_retriever_still_warns_when_its_gallery_has_grown(tmp_path):
    retriever, _ = made(tuning="gallery")
    added = np.repeat([LABELS], ITEMS)
    with pytest.warns(UserWarning, match="31 of 61"):
        retriever.add(draw(added, 5), [f"new {n}" for n in range(ITEMS)], added)
    loaded = rcir.load(retriever.save(tmp_path / "grown"))
    with pytest.warns(UserWarning, match="31 of 61.* 30 of 60"):
        loaded.recalibrate()


def of_labels(labels, scores, relevant):
    """Return scored queries of these labels."""
    return ScoredResults.from_scores(
        scores, relevant, population=Population(len(labels), labels=labels)
    )


def equal_within_labels(labels, queries=3):
    """Return queries whose match is in place 0 for the first label, 1 for the second, and so on."""
    label = np.repeat(np.arange(labels), queries)
    scores = np.tile(np.arange(50, dtype=np.float32), (len(label), 1))
    return of_labels(label, scores, scores == label[:, None])


def test_as_many_labels_certify_as_the_refusal_says():
    """A tenth needs 22 labels without a miss: 0.9^21 > 0.1 > 0.9^22."""
    request = make_request(0.1, 0.1, query_labels="new")
    tuning = equal_within_labels(50)
    with pytest.raises(RiskUnattainable, match="1 more labels") as caught:
        certify(request, equal_within_labels(21), tuning)
    assert caught.value.required_calibration == 22
    smallest = replace(request, levels={"miss": caught.value.minimum_alpha})
    assert certify(smallest, equal_within_labels(21), tuning).threshold == 20
    assert certify(request, equal_within_labels(22), tuning).threshold == 21


@pytest.mark.parametrize("query_labels", ["new", "any"])
@pytest.mark.parametrize("seed", range(6))
def test_every_alpha_from_the_one_that_a_refusal_states_on_is_certified(query_labels, seed):
    """Stakes are on one query of each label for the smallest of these alphas, then on all."""
    rng = np.random.default_rng(seed)

    def drawn(labels):
        label = rng.integers(labels, size=6 * labels)
        difficulty = rng.normal(0, 0.6, labels)[label]
        first = np.floor(np.exp(difficulty + rng.standard_normal(len(label))))
        scores = np.tile(np.arange(30, dtype=np.float32), (len(label), 1))
        return of_labels(label, scores, scores == first[:, None])

    tuning, calibration = drawn(60), drawn(12 + 8 * seed)
    request = make_request(0.02, 0.1, query_labels=query_labels)
    with pytest.raises(RiskUnattainable) as caught:
        certify(request, calibration, tuning)
    for alpha in np.linspace(caught.value.minimum_alpha, 0.7, 100):
        certify(replace(request, levels={"miss": float(alpha)}), calibration, tuning)


@pytest.mark.parametrize("query_labels", ["new", "any"])
def test_a_refusal_of_every_alpha_states_none(query_labels):
    scores = np.zeros((40, 1), np.float32)
    labels = np.arange(40) // 2
    missed = of_labels(labels, scores, np.zeros((40, 1), bool))
    with pytest.raises(RiskUnattainable) as caught:
        certify(make_request(0.1, 0.1, query_labels=query_labels), missed, missed)
    assert caught.value.minimum_alpha is None


def test_cells_of_a_grid_stand_for_the_labels_of_places(tmp_path):
    rng = np.random.default_rng(6)
    gallery, asked = rng.uniform(-30, 30, (4000, 2)), rng.uniform(-30, 30, (900, 2))
    vectors, queries = (
        np.concatenate([where, 0.3 * rng.standard_normal((len(where), 6))], axis=1)
        for where in (gallery, asked)
    )
    own = rcir.Retriever.from_embeddings(vectors, labels=WithinRadius(gallery, 1.0))
    places = WithinRadius(asked, 1.0)
    own.calibrate(queries, places, "quantile")
    with pytest.raises(InvalidConfig, match="labels"):
        own.guarantee(0.4, 0.1, query_labels="new")
    own.calibrate(queries, places, "quantile", tuning="labels")
    calibration, request = own.require_calibration(), make_request(0.4, 0.1)

    rule = calibration.miss_rule
    labels = rule.evidence.population.labels
    cells = np.unique(
        calibration.calibration_queries.relevance.places // 10, axis=0, return_inverse=True
    )[1]
    assert len(set(zip(labels, cells, strict=True))) == len(set(labels)) == len(set(cells))
    calibrated = in_population(rule.evidence, clusters=labels, cluster_word="cell")
    expected = certify(request, calibrated, rule.tuned)
    loaded = rcir.load(own.save(tmp_path / "places"))
    for retriever in (own, loaded):
        guarantee = retriever.guarantee(0.4, 0.1, query_labels="new")
        assert (guarantee.threshold, guarantee.n_labels) == (
            expected.threshold,
            calibrated.population.n_units,
        )
        assert "any further 10-wide cell" in str(guarantee)
        assert "cell" not in str(retriever.guarantee(0.4, 0.1))


def test_the_order_of_the_queries_draws_no_others_of_each_label():
    names = set()
    for seed in range(4):
        rows = np.random.default_rng(seed).permutation(len(QUERY_LABELS))
        retriever, _ = made(rows, tuning="gallery")
        guarantee = retriever.guarantee(0.15, 0.1, query_labels="new", distinct="label")
        names.add((guarantee.bound, guarantee.threshold))
    ((bound, _),) = names
    assert bound == "betting"


def test_losses_of_a_custom_risk_are_checked_for_new_labels(monkeypatch):
    risk = Risk(
        name="not-decided-by-the-first",
        losses=lambda scored, at: (scored.n_within(at, scored.relevant) < 2).astype(float),
        clause="fewer than two {matches} are in at most {alpha} of the {sets}",
        binary=True,
        first_match=True,
    )
    monkeypatch.setitem(losses._table, risk.key, risk)
    labels = np.repeat(np.arange(22), 3)
    scores = np.tile(np.arange(12, dtype=np.float32), (len(labels), 1))
    queries = of_labels(labels, scores, np.isin(scores, [0, 10]))
    request = make_request(0.1, 0.1, risk=risk.name, query_labels="new")
    with pytest.raises(InvalidData, match="first"):
        certify(request, queries, queries)


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_distant_places_are_in_different_cells(dim):
    places = np.zeros((dim + 1, dim))
    places[0, 0] = 10 * 2.0**20
    for axis in range(dim):
        places[axis + 1, axis] = 15
    assert len(set(WithinRadius(places, 1.0).cells.tolist())) == dim + 1
