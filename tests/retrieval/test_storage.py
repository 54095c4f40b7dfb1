"""Retrievers that are saved to a folder and loaded again."""

import pickle
import pickletools
import re
import shutil
import stat
import zipfile
from itertools import product

import numpy as np
import pytest
import torch

from rcir.data import Preprocessing
from rcir.encoders import METHODS, build_encoder
from rcir.errors import StaleCalibration
from rcir.retrieval.retriever import Retriever
from rcir.risk import SCORE_FUNCTIONS
from tests.methods import CERTAIN, config_of
from tests.retrieval.retrievers import build, calibrate, guarantee, plain, retrieve
from tests.retrieval.whole_numbers import CALIBRATION, GALLERY, TUNING

load = Retriever.load


def contents(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def answers(retriever, images):
    return plain(retriever.retrieve(list(images), 0.5, 0.1))


def test_a_loaded_retriever_answers_as_before(retriever, loaded, splits):
    images = splits.test.images
    assert answers(loaded, images) == answers(retriever, images)
    assert loaded.searcher.fingerprints() == retriever.searcher.fingerprints()
    before, after = retriever.search(images), loaded.search(images)
    np.testing.assert_array_equal(after.distances, before.distances)
    np.testing.assert_array_equal(after.positions, before.positions)
    np.testing.assert_array_equal(after.uncertainty, before.uncertainty)
    np.testing.assert_array_equal(loaded.searcher.digests, retriever.searcher.digests)
    np.testing.assert_array_equal(
        loaded.calibration.query_digests, retriever.calibration.query_digests
    )


def test_a_saved_copy_of_a_loaded_retriever_has_the_same_files(loaded, tmp_path):
    before = contents(loaded.version_folder)
    loaded.save(tmp_path / "copy")
    assert contents(loaded.version_folder) == before


REQUESTS = (
    (0.5, {}),
    (0.6, {"distinct": "label"}),
    (0.95, {"risk": "recall"}),
    (0.95, {"risk": "false-discovery"}),
    ({"miss": 0.8, "false-discovery": 0.98}, {}),
    (0.95, {"abstain": True}),
    (0.6, {"group": "hard"}),
    (0.6, {"simultaneous": True}),
)


@pytest.mark.parametrize(
    ("score_function", "change"),
    [
        *product((*SCORE_FUNCTIONS, "auto"), ({}, {"uncertainty": None})),
        *((name, {"labels": None}) for name in SCORE_FUNCTIONS),
    ],
    ids=str,
)
def test_every_score_function_survives(tmp_path, score_function, change):
    own, searched = build(depth=20, **change), []
    labelled = "labels" not in change
    items = [np.flatnonzero(GALLERY.labels == label).astype(str).tolist() for label in range(20)]
    for part in (TUNING, CALIBRATION):
        labels = part.labels if labelled else [items[label] for label in part.labels]
        queries = own.labelled(part.vectors, labels, part.uncertainty, groups=part.groups)
        searched.append(own.search_labelled(queries))
    own.calibrate_splits(*searched, score_function)
    loaded = load(own.save(tmp_path / "own"))
    for alpha, options in REQUESTS:
        if labelled or "distinct" not in options:
            before, after = (plain(retrieve(one, alpha, **options)) for one in (own, loaded))
            assert before == after
    by_labels = score_function == "auto"
    expected = "label-model" if by_labels else score_function
    assert guarantee(loaded, 0.5).score_function == expected
    # Those that learn which match is first tell nothing about the others.
    learns = score_function == "learned"
    for risk in ("recall", "false-discovery"):
        expected = "match-probability" if learns else score_function
        expected = "label-lists" if by_labels else expected
        assert guarantee(loaded, 0.95, risk=risk).score_function == expected
    assert loaded.check(searched[1], 0.5) == own.check(searched[1], 0.5)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_encoder_survives(splits, tmp_path, method):
    encoder = build_encoder(config_of(method, dim=6), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=50)
    built.calibrate_splits(
        *map(built.search_labelled, (splits.tuning, splits.calibration)), "minmax"
    )
    loaded = load(built.save(tmp_path / "retriever"))
    assert answers(loaded, splits.test.images[:20]) == answers(built, splits.test.images[:20])
    # LAM is fitted after training.
    assert (loaded.searcher.gallery.uncertainty is None) == (method in (*CERTAIN, "lam"))
    assert loaded.searcher.fingerprints() == built.searcher.fingerprints()


@pytest.mark.parametrize("method", ["btl", "vmf", "tripreg"])
def test_a_folder_that_names_no_activation_keeps_its_relu_and_calibration(
    splits, tmp_path, method, sign
):
    config = config_of(method, dim=6, options={"activation": "relu"})
    encoder = build_encoder(config, 1, (8, 16))
    for values in encoder.parameters():  # the last layer of the head is 0 at first
        torch.nn.init.normal_(
            values, std=0.1, generator=torch.Generator().manual_seed(values.numel())
        )
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=50)
    parts = map(built.search_labelled, (splits.tuning, splits.calibration))
    built.calibrate_splits(*parts, "minmax", query_uncertainty="encoder")
    built.save(tmp_path / "retriever")
    (file,) = tmp_path.rglob("retriever.json")
    before = file.read_text()
    assert before.count('"activation": "relu"') == 1
    file.write_text(re.sub(r'"activation": "relu",?', "", before))
    sign(file.parent)
    queries = splits.test.images[:20]
    assert answers(load(tmp_path / "retriever"), queries) == answers(built, queries)
    # With another activation, the weights compute something else, and the calibration is refused.
    file.write_text(before.replace('"activation": "relu"', '"activation": "leaky-relu"'))
    sign(file.parent)
    with pytest.raises(StaleCalibration):
        answers(load(tmp_path / "retriever"), queries)


def test_the_score_functions_that_auto_chose_for_each_risk_survive(tmp_path):
    own = calibrate(build(depth=20), "auto", groups=False)
    loaded = load(own.save(tmp_path / "own"))
    names = set()
    for distinct in (None, "label"):
        for risk in ("miss", "recall", "false-discovery"):
            options = {"risk": risk, "distinct": distinct}
            before, after = (retrieve(one, 0.95, **options) for one in (own, loaded))
            assert plain(before) == plain(after)
            names.add(after[0].guarantee.score_function)
    assert len(names) > 1


def test_the_origin_survives_and_changes_no_fingerprint(loaded, retriever, tmp_path):
    assert loaded.origin == retriever.origin == {}
    loaded.origin = {"data": {"name": "digits", "options": {"test": 9}}, "run": "0a", "group": None}
    again = load(loaded.save(tmp_path / "copy"))
    assert again.origin == loaded.origin
    assert again.searcher.fingerprints() == retriever.searcher.fingerprints()


def test_a_retriever_without_calibration_survives_as_such(retriever, splits, tmp_path):
    bare = Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery)
    loaded = load(bare.save(tmp_path / "bare"))
    with pytest.raises(StaleCalibration, match="not calibrated"):
        loaded.retrieve(splits.test.images[0], 0.3, 0.1)
    found, expected = (each.search(splits.test.images[:5]) for each in (loaded, bare))
    np.testing.assert_array_equal(found.positions, expected.positions)


def test_no_file_is_a_pickle_and_none_is_unpickled(folder, splits, monkeypatch):
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert not zipfile.is_zipfile(path)
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))
    expected = answers(load(folder), splits.test.images[:3])

    def refuse(*_arguments, **_options):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    assert answers(load(folder), splits.test.images[:3]) == expected


# The folder


def test_others_may_read_what_the_umask_allows(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    paths = (folder, load(folder).version_folder, tmp_path / "plain")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in paths}) == 1


def test_a_folder_may_be_moved(folder, retriever, splits, tmp_path):
    moved = tmp_path / "a" / "new place"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    images = splits.test.images[:3]
    assert answers(load(str(moved)), images) == answers(retriever, images)
