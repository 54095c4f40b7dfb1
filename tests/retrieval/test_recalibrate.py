"""A gallery that changes: the same queries calibrate again, without pictures."""

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.risk import LabelledResults

CENTRES = np.random.default_rng(0).standard_normal((10, 6))
NAMES = np.array([f"kind {number}" for number in range(14)])


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=n)
    return (CENTRES[labels] + 0.6 * rng.standard_normal((n, 6))).astype(np.float32), labels


GALLERY, LABELS = drawn(300, 1)
ASKED, ASKED_LABELS = drawn(500, 2)
NEW, NEW_LABELS = drawn(80, 3)


def calibrated(**known):
    own = rcir.Retriever.from_embeddings(GALLERY, labels=NAMES[LABELS])
    own.calibrate(ASKED, NAMES[ASKED_LABELS], **known)
    return own


def grown(own):
    own.add(NEW, [f"new {row}" for row in range(80)], NAMES[NEW_LABELS])
    own.remove([str(row) for row in range(40)])
    return own


def answers(own, **options):
    queries, _ = drawn(60, 9)
    return [answer.to_dict() for answer in own.retrieve(queries, 0.2, 0.1, **options)]


def from_scratch(**known):
    vectors = np.concatenate([GALLERY[40:], NEW])
    ids = [*map(str, range(40, 300)), *(f"new {row}" for row in range(80))]
    labels = NAMES[np.concatenate([LABELS[40:], NEW_LABELS])]
    own = rcir.Retriever.from_embeddings(vectors, ids, labels)
    own.calibrate(ASKED, NAMES[ASKED_LABELS], **known)
    return own


@pytest.mark.parametrize("known", [{}, {"score_function": "minmax", "bound": "hoeffding"}], ids=str)
def test_a_recalibrated_retriever_is_one_calibrated_from_scratch(known):
    own, fresh = grown(calibrated(**known)), from_scratch(**known)
    with pytest.raises(StaleCalibration, match=r"gallery, index.*call `recalibrate`"):
        answers(own)
    before = answers(fresh)
    own.recalibrate()
    assert answers(own) == before
    assert own.recalibrate() == fresh.recalibrate()


def test_it_is_done_after_loading_as_before(tmp_path):
    own = calibrated(uncertainty=np.linspace(0, 1, 500), groups=np.repeat(["a", "b"], 250), seed=3)
    loaded = rcir.load(own.save(tmp_path / "own"))
    for one in (own, loaded):
        grown(one).recalibrate()
    for options in ({}, {"group": "a"}, {"distinct": "label"}):
        first, second = (
            answers(one, uncertainty=np.full(60, 0.3), **options) for one in (own, loaded)
        )
        assert first == second
    assert set(own.calibration_queries.groups) == {"a", "b"}


def test_a_label_that_only_queries_had_is_known_when_an_item_brings_it():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=NAMES[LABELS])
    names = NAMES[ASKED_LABELS].copy()
    names[:100] = "kind 13"  # of which the gallery holds nothing yet
    own.calibrate(ASKED, names, "constant")
    before = own.calibration_queries.relevance.totals(own.relevance)
    own.add(NEW, [f"new {row}" for row in range(80)], ["kind 12"] * 40 + ["kind 13"] * 40)
    own.recalibrate()
    totals = own.calibration_queries.relevance.totals(own.relevance)
    rows = np.random.default_rng(0).permutation(500)[150:]
    np.testing.assert_array_equal(totals - before, np.where(rows < 100, 40, 0))


def test_clusters_stay_clusters(tmp_path):
    own = calibrated(clusters=np.repeat(np.arange(100), 5), cluster="drive")
    loaded = grown(rcir.load(own.save(tmp_path / "own")))
    loaded.recalibrate()
    assert loaded.controller.cluster == "drive"
    assert loaded.controller.calibration.units == 70


def test_what_was_chosen_among_several_stays_so():
    own = calibrated()
    own.chosen_among = 4
    grown(own).recalibrate()
    assert own.chosen_among == 4


def test_added_queries_calibrate_with_the_others():
    own = calibrated()
    further, labels = drawn(200, 7)
    own.extend_calibration(further, NAMES[labels])
    before = answers(own, anytime=True)
    own.recalibrate()
    assert answers(own, anytime=True) == before  # the gallery is as it was
    grown(own).recalibrate()
    answer = own.retrieve(NEW[0] + 0.01, 0.3, 0.1, anytime=True)
    assert answer.guarantee.n_calibration == 550
    with pytest.raises(InvalidConfig, match="anytime=True"):
        own.retrieve(NEW[0] + 0.01, 0.3, 0.1)


@pytest.mark.parametrize("among", [1, 4])
@pytest.mark.parametrize("growing", [False, True])
def test_the_report_is_of_the_guarantees_that_are_given(growing, among):
    own = calibrated(alphas=(0.3,))
    if growing:
        further, labels = drawn(200, 7)
        own.extend_calibration(further, NAMES[labels])
    own.chosen_among = among
    report = grown(own).recalibrate()
    asked = own.calibration_queries.vectors
    given = own.retrieve(asked, 0.3, 0.1, anytime=growing)
    assert report.rows[0].mean_size == pytest.approx(np.mean([len(one.ids) for one in given]))
    assert ("at every moment since calibration began" in str(report)) == growing
    assert str(report).startswith("Chosen among 4 retrievers") == (among > 1)


def test_added_queries_survive_saving(tmp_path):
    own = calibrated()
    further, labels = drawn(200, 7)
    own.extend_calibration(further, NAMES[labels])
    loaded = rcir.load(own.save(tmp_path / "own"))
    assert len(loaded.calibration_queries) == 550
    with pytest.raises(InvalidData, match="200 of 200 queries to add were tuned or calibrated"):
        loaded.extend_calibration(further, NAMES[labels])
    assert grown(loaded).recalibrate() == grown(own).recalibrate()


def test_pictures_are_not_needed(retriever, splits, tmp_path):
    """Of a retriever with an encoder the vectors of its queries are kept."""
    from rcir.retrieval.retriever import Retriever

    own = Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery, 50)
    tuning, calibration = map(own.search_labelled, (splits.tuning, splits.calibration))
    own.calibrate(tuning, calibration, recurring=True)
    own = Retriever.load(own.save(tmp_path / "own"))
    own.add(splits.test.images[:9], [f"new {n}" for n in range(9)], splits.test.labels[:9])
    own.embed = None  # nothing may be embedded
    own.recalibrate()
    del own.embed
    before = [one.to_dict() for one in own.retrieve(list(splits.test.images[20:30]), 0.3, 0.1)]
    tuning, calibration = map(own.search_labelled, (splits.tuning, splits.calibration))
    own.calibrate(tuning, calibration, recurring=True)
    after = [one.to_dict() for one in own.retrieve(list(splits.test.images[20:30]), 0.3, 0.1)]
    assert after == before


def test_judgements_that_follow_from_nothing_cannot_be_made_again():
    """Truth that was told query by query says nothing of new items."""
    own = rcir.Retriever.from_embeddings(GALLERY, labels=NAMES[LABELS])
    parts = []
    for rows in (slice(0, 150), slice(150, 500)):
        found = own.search(ASKED[rows])
        relevant = LABELS[found.positions] == ASKED_LABELS[rows][:, None]
        parts.append(LabelledResults.of(found, relevant, np.full(len(relevant), 300)))
    own.calibrate(*parts, "constant")
    with pytest.raises(InvalidData, match="not known which queries the gallery items match"):
        own.recalibrate()


def test_without_a_calibration_there_is_nothing_to_do_again():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=NAMES[LABELS])
    with pytest.raises(StaleCalibration, match="not calibrated"):
        own.recalibrate()


def test_another_encoder_has_other_vectors(retriever, splits, tmp_path):
    from rcir.retrieval.retriever import Retriever

    own = Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery, 50)
    tuning, calibration = map(own.search_labelled, (splits.tuning, splits.calibration))
    own.calibrate(tuning, calibration, "constant", recurring=True)
    own = Retriever.load(own.save(tmp_path / "own"))
    next(own.encoder.parameters()).data.mul_(2)
    next(own.encoder.parameters()).detach().mul_(1.0)
    with pytest.raises(StaleCalibration, match="the encoder changed since calibration"):
        own.recalibrate()
