import pickle
import pickletools
import shutil
import stat
import zipfile

import numpy as np
import pytest
import torch

from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import CorruptRetriever
from rcir.index import FlatIndex
from rcir.retriever import Retriever
from rcir.risk import ADAPTERS, RiskController
from rcir.storage import load, save


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def answers(retriever, images):
    return [answer.to_dict() for answer in retriever.retrieve(list(images), 0.3, 0.1)]


def test_a_loaded_retriever_answers_as_before(retriever, folder, splits):
    loaded = load(folder)
    images = splits.test.images
    assert answers(loaded, images) == answers(retriever, images)
    assert str(loaded.guarantee(0.3, 0.1)) == str(retriever.guarantee(0.3, 0.1))
    assert loaded.fingerprints() == retriever.fingerprints()
    before, after = retriever.search(images), loaded.search(images)
    np.testing.assert_array_equal(after.distances, before.distances)
    np.testing.assert_array_equal(after.positions, before.positions)
    np.testing.assert_array_equal(after.uncertainty, before.uncertainty)


def test_a_saved_copy_of_a_loaded_retriever_has_the_same_files(folder, tmp_path):
    copy = save(load(folder), tmp_path / "copy")
    assert contents(copy) == contents(folder)
    assert {name.partition(".")[0] for name in contents(copy)} == {
        *("manifest", "retriever", "encoder", "controller", "index", "gallery", "labels")
    }


@pytest.mark.parametrize("method", ["deterministic", "deep-ensemble", "btl"])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=lambda kind: kind.name)
def test_every_encoder_and_adapter_survives(retriever, splits, tmp_path, method, adapter):
    config = EncoderConfig(method, dim=6, members=2)
    encoder = build_encoder(config, 1, (8, 16))
    gallery = splits.gallery
    index = FlatIndex(encoder.embed(torch.zeros(1, 1, 8, 16)).mean.shape[1])
    index.add(encoder.embed(retriever.preprocessing(gallery.images)).mean.numpy())
    built = Retriever(encoder, retriever.preprocessing, index, gallery.ids, depth=50)
    rng = np.random.default_rng(0)
    fitted, ranks = adapter.fit(rng.gamma(2, size=90)), rng.integers(1, 50, 200)
    built.controller = RiskController.calibrate(fitted, rng.gamma(2, size=200), ranks, 50)
    built.calibrated_on = built.fingerprints()
    loaded = load(save(built, tmp_path / "retriever"))
    assert loaded.labels is None
    assert not (tmp_path / "retriever" / "labels.npy").exists()
    assert answers(loaded, splits.test.images) == answers(built, splits.test.images)


def test_nothing_in_the_folder_is_a_pickle(folder):
    for path in folder.iterdir():
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


class FullDisk(FlatIndex):
    def save(self, path):
        super().save(path)
        raise OSError("no space left on device")


def test_a_save_that_fails_leaves_the_old_folder_and_nothing_else(folder, tmp_path):
    before, changed = contents(folder), load(folder)
    changed.index.__class__ = FullDisk
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
