import pickle
import pickletools
import shutil
import stat
import zipfile
from itertools import product

import numpy as np
import pytest
import torch

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.encoders import METHODS, build_encoder
from rcir.errors import CorruptRetriever, StaleCalibration
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save
from rcir.risk import SCORE_FUNCTIONS, LabelledResults
from tests.methods import CERTAIN, config_of


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def answers(retriever, images):
    return [answer.to_dict() for answer in retriever.retrieve(list(images), 0.3, 0.1)]


def test_a_loaded_retriever_answers_as_before(retriever, folder, splits):
    loaded = load(folder)
    images = splits.test.images
    assert answers(loaded, images) == answers(retriever, images)
    assert loaded.fingerprints() == retriever.fingerprints()
    before, after = retriever.search(images), loaded.search(images)
    np.testing.assert_array_equal(after.distances, before.distances)
    np.testing.assert_array_equal(after.positions, before.positions)
    np.testing.assert_array_equal(after.uncertainty, before.uncertainty)
    np.testing.assert_array_equal(loaded.digests, retriever.digests)
    np.testing.assert_array_equal(loaded.query_digests, retriever.query_digests)


def test_a_saved_copy_of_a_loaded_retriever_has_the_same_files(folder, tmp_path):
    copy = save(load(folder), tmp_path / "copy")
    assert contents(copy) == contents(folder)
    assert {name.partition(".")[0] for name in contents(copy)} == {
        *("manifest", "retriever", "encoder", "controller", "index/vectors", "gallery"),
        *("relevance",),
        *("uncertainty", "digests", "queries"),
    }


REQUESTS = (
    (0.6, {"distinct": "label"}),
    (0.95, {"risk": "recall"}),
    (0.95, {"risk": "false-discovery"}),
    ({"miss": 0.8, "false-discovery": 0.98}, {}),
    (0.95, {"abstain": True}),
    (0.6, {"group": "True"}),
    (0.6, {"simultaneous": True}),
)


def everything(retriever, images):
    """What is answered to every kind of request."""
    images = list(images)
    return [
        [answer.to_dict() for answer in retriever.retrieve(images, alpha, 0.1, **options)]
        for alpha, options in ((0.5, {}), *REQUESTS)
    ]


CROSSED = ("deterministic", "deep-ensemble", "btl")  # with every score function


@pytest.mark.parametrize(
    ("method", "score_function"),
    [
        *product(CROSSED, SCORE_FUNCTIONS),
        *((name, "learned") for name in sorted(METHODS.keys() - set(CROSSED))),
    ],
)
def test_every_encoder_and_score_function_survives(splits, tmp_path, method, score_function):
    encoder = build_encoder(config_of(method, dim=6), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=50)
    first, second = (
        built.search_labelled(part, "occluded") for part in (splits.tuning, splits.calibration)
    )
    report = built.calibrate(first, second, score_function)
    assert report.comparison == {None: {}, "label": {}}
    loaded = load(save(built, tmp_path / "retriever"))
    for distinct in (None, "label"):
        assert loaded.controllers[distinct].score_function.name == score_function
        # Those that learn who is the first match say nothing of the others. (Of labels one is
        # right: its recall is whether it is missed.)
        learns = score_function in ("learned", "boosted", "reranked")
        risks = ["recall", "false-discovery"] if distinct is None else ["false-discovery"]
        own = loaded.controllers[distinct].own
        assert list(own) == (risks if learns else [])
        assert {one.score_function.name for one in own.values()} <= {"match-probability"}
    before, after = (everything(each, splits.test.images[:20]) for each in (built, loaded))
    assert after == before
    certain = method in (*CERTAIN, "lam")  # which is fitted after training
    assert (loaded.item_uncertainty is None) == certain
    assert (tmp_path / "retriever" / "uncertainty.npy").exists() != certain
    assert str(loaded.check(second, 0.5)) == str(built.check(second, 0.5))


@pytest.mark.parametrize("score_function", sorted(SCORE_FUNCTIONS.keys() - {"reranked"}))
def test_a_gallery_without_labels_survives(retriever, splits, tmp_path, score_function):
    built = Retriever(
        retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids, depth=50
    )
    parts = []
    for part in (splits.tuning, splits.calibration):
        found = built.search(part.images)
        relevant = splits.gallery.labels[found.positions] == part.labels[:, None]
        parts.append(LabelledResults.of(found, relevant, np.full(len(relevant), 300)))
    built.calibrate(*parts, score_function)
    loaded = load(save(built, tmp_path / "retriever"))
    assert loaded.labels is None
    assert not (tmp_path / "retriever" / "relevance.safetensors").exists()
    assert list(loaded.controllers) == [None]
    assert answers(loaded, splits.test.images) == answers(built, splits.test.images)


def test_the_score_functions_of_each_risk_survive(retriever, splits, tmp_path):
    """Whatever "auto" takes for each: stored, they are asked for by risk and by kind of set."""
    built = Retriever.build(retriever.encoder, Preprocessing(), splits.gallery, depth=50)
    built.calibrate(built.search_labelled(splits.tuning), built.search_labelled(splits.calibration))
    loaded = load(save(built, tmp_path / "retriever"))
    images = list(splits.test.images[:20])
    for distinct in (None, "label"):
        before, after = built.controllers[distinct], loaded.controllers[distinct]
        assert before.own.keys() == after.own.keys()
        assert before.own.keys() | after.own.keys() <= {"recall", "false-discovery"}
        for risk, one in before.own.items():
            asked = {"risk": risk, "distinct": distinct}
            first, second = (each.retrieve(images, 0.95, 0.1, **asked) for each in (built, loaded))
            assert [each.to_dict() for each in first] == [each.to_dict() for each in second]
            assert (
                second[0].guarantee.score_function
                == one.score_function.name
                != before.score_function.name
            )
            state, stored = one.score_function.state(), after.own[risk].score_function.state()
            for name, values in state.items():
                np.testing.assert_array_equal(stored[name], values)
    assert built.controllers[None].own, "nothing was tested"


def relevances(labels):
    """What else than one label makes two-digit numbers match: a shared digit, a near place."""
    digits = np.stack(np.divmod(labels, 10), axis=1)
    return (
        SharedLabel.of_lists((digits + np.array([0, 10])).tolist(), 20),
        WithinRadius(digits.astype(float), 1.5),
    )


@pytest.mark.parametrize("kind", [0, 1], ids=["shared labels", "places"])
def test_what_makes_images_match_survives(retriever, splits, tmp_path, kind):
    def part(images):
        relevance = relevances(images.labels)[kind]
        return ImageSet(images.images, None, images.ids, {}, relevance)

    built = Retriever.build(retriever.encoder, Preprocessing(), part(splits.gallery), depth=50)
    built.calibrate(
        built.search_labelled(part(splits.tuning)), built.search_labelled(part(splits.calibration))
    )
    loaded = load(save(built, tmp_path / "retriever"))
    assert loaded.labels is None
    assert loaded.fingerprints() == built.fingerprints()
    before, after = (each.search_labelled(part(splits.test)) for each in (built, loaded))
    assert 0 < before.relevant.mean() < 1
    np.testing.assert_array_equal(after.relevant, before.relevant)
    np.testing.assert_array_equal(after.totals, before.totals)
    assert answers(loaded, splits.test.images[:9]) == answers(built, splits.test.images[:9])


def test_where_it_comes_from_survives_and_decides_nothing(folder, retriever, tmp_path):
    loaded = load(folder)
    assert loaded.origin == retriever.origin == {}
    loaded.origin = {"data": {"name": "digits", "options": {"test": 9}}, "run": "0a", "group": None}
    again = load(save(loaded, tmp_path / "copy"))
    assert again.origin == loaded.origin
    assert again.fingerprints() == retriever.fingerprints()


def test_what_is_not_calibrated_survives_as_such(retriever, splits, tmp_path):
    bare = Retriever(
        retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids
    )
    loaded = load(save(bare, tmp_path / "bare"))
    assert not (tmp_path / "bare" / "controller.safetensors").exists()
    with pytest.raises(StaleCalibration, match="not calibrated"):
        loaded.retrieve(splits.test.images[0], 0.3, 0.1)
    found, expected = (each.search(splits.test.images[:5]) for each in (loaded, bare))
    np.testing.assert_array_equal(found.positions, expected.positions)


def test_nothing_in_the_folder_is_a_pickle(folder):
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert not zipfile.is_zipfile(path)
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))


def test_loading_never_unpickles(folder, splits, monkeypatch):
    expected = answers(load(folder), splits.test.images[:3])

    def refuse(*_arguments, **_options):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert answers(load(folder), splits.test.images[:3]) == expected


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_that_is_something_else_is_left_alone(retriever, tmp_path, name):
    target = tmp_path / "mine"
    target.mkdir()
    (target / name).write_text('{"name": "a web page"}')
    before = contents(target)
    with pytest.raises(CorruptRetriever, match="left alone; choose another folder"):
        save(retriever, target)
    assert contents(target) == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_in_the_way_is_left_alone(retriever, tmp_path):
    (tmp_path / "mine").write_text("hello")
    with pytest.raises(CorruptRetriever, match="left alone"):
        save(retriever, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "hello"


def test_a_retriever_and_an_empty_folder_are_replaced(folder, retriever, tmp_path):
    (tmp_path / "empty").mkdir()
    assert contents(save(retriever, tmp_path / "empty")) == contents(folder)
    changed = load(folder)
    changed.add([np.zeros((8, 16), np.uint8)], ["black"], [0])
    save(changed, folder)
    assert load(folder).ids[-1] == "black"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "retriever"]


def test_a_save_that_fails_leaves_the_old_folder_and_nothing_else(folder, tmp_path, monkeypatch):
    before, changed = contents(folder), load(folder)

    def full(*_arguments, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", full)
    changed.add([np.zeros((8, 16), np.uint8)], ["black"], [0])
    with pytest.raises(OSError, match="no space left"):
        save(changed, folder)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(OSError, match="no space left"):
        save(changed, tmp_path / "new")
    assert list(tmp_path.iterdir()) == [folder]


def test_others_may_read_what_the_umask_lets_them(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, tmp_path / "plain")}
    assert len(modes) == 1


def test_a_folder_may_be_moved(folder, retriever, splits, tmp_path):
    moved = tmp_path / "a" / "new place"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    assert answers(load(str(moved)), splits.test.images[:3]) == answers(
        retriever, splits.test.images[:3]
    )
