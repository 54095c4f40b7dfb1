import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rcir.errors import CorruptRetriever, InvalidData, NoRetriever, RcirError
from rcir.retrieval.storage import load, save

FILES = (
    "retriever.json",
    "encoder.safetensors",
    "controller.safetensors",
    "index/vectors.npy",
    "gallery.json",
    "relevance.safetensors",
    "uncertainty.npy",
    "digests.npy",
    "queries.npy",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_one_changed_byte_in_any_file_is_noticed(folder, name, share):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptRetriever, match=f"{name} was changed.*calibrate again"):
        load(folder)


def test_any_changed_byte_of_the_manifest_is_noticed(folder):
    path = folder / "manifest.json"
    original = path.read_bytes()
    for place, byte in enumerate(original):
        # The last bit; a capital; white space that JSON takes for the same.
        for other in {byte ^ 0x01, byte ^ 0x20, ord("\t") if byte in b" \n" else byte ^ 0x01}:
            path.write_bytes(original[:place] + bytes([other]) + original[place + 1 :])
            with pytest.raises(CorruptRetriever):
                load(folder)
    path.write_bytes(original)
    load(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_noticed(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptRetriever, match=name):
        load(folder)
    path.unlink()
    with pytest.raises(CorruptRetriever, match=f"{name} is missing"):
        load(folder)


def sign(folder):
    """Make the manifest vouch for the files as they are."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize(
    "harm",
    [
        lambda arrays: arrays.pop("None.main.calibration.candidate_scores"),
        lambda arrays: arrays.pop("label.main.tuning.relevant"),
        lambda arrays: arrays.pop("None.main.score_function.sample"),
        lambda arrays: arrays.update({"None.main.calibration.extra": np.zeros(3)}),
        lambda arrays: arrays.update({"None.main.calibration.selection_score": np.zeros(3)}),
        lambda arrays: arrays.update({"None.main.calibration.totals": np.zeros(400, np.int64)}),
        lambda arrays: arrays.update(
            {
                name: np.ascontiguousarray(arrays[name][:, :9])
                for name in ("None.main.tuning.candidate_scores", "None.main.tuning.relevant")
            }
        ),
        lambda arrays: arrays.clear(),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused_though_signed(folder, harm):
    arrays = load_file(folder / "controller.safetensors")
    harm(arrays)
    save_file(arrays, folder / "controller.safetensors")
    sign(folder)
    with pytest.raises((CorruptRetriever, InvalidData)):
        load(folder)


def test_a_risk_without_its_own_calibration_is_refused_though_signed(folder, splits):
    retriever = load(folder)
    retriever.calibrate(
        retriever.search_labelled(splits.tuning),
        retriever.search_labelled(splits.calibration),
        "learned",
    )
    save(retriever, folder)
    assert load(folder).controllers[None].own.keys() == {"recall", "false-discovery"}
    arrays = load_file(folder / "controller.safetensors")
    kept = {name: values for name, values in arrays.items() if ".recall.cal" not in name}
    assert len(kept) < len(arrays)
    save_file(kept, folder / "controller.safetensors")
    sign(folder)
    with pytest.raises(CorruptRetriever, match="cannot be read although its checksums are right"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 100])
def test_a_calibration_that_is_no_safetensors_is_refused_though_signed(folder, content):
    (folder / "controller.safetensors").write_bytes(content)
    sign(folder)
    with pytest.raises(CorruptRetriever, match="cannot be read although its checksums are right"):
        load(folder)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"labels": np.zeros(7, np.int64)},
        {"places": np.full((300, 2), np.nan), "radius": np.ones(1)},
        {"places": np.zeros((300, 2))},
        {"indices": np.zeros(300, np.int32), "indptr": np.arange(301, dtype=np.int32)},
    ],
    ids=lambda arrays: " and ".join(arrays) or "nothing",
)
def test_what_matches_is_refused_where_it_makes_no_sense_though_signed(folder, arrays):
    save_file(arrays, folder / "relevance.safetensors")
    sign(folder)
    with pytest.raises((CorruptRetriever, InvalidData)):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"score_functions": {"main": "best"}},
        {"score_functions": {}},
        {"score_functions": {"main": "quantile", "recall": "quantile"}},
        {"bound": "chernoff"},
        {"distinct": "id"},
        {"groups": ["a"]},
        {"cluster": "video"},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused_though_signed(folder, change):
    path = folder / "retriever.json"
    description = json.loads(path.read_text())
    description["controllers"][0] |= change
    path.write_text(json.dumps(description))
    sign(folder)
    with pytest.raises(RcirError):
        load(folder)


def test_signed_again_as_it_is_it_is_read(folder):
    save_file(load_file(folder / "controller.safetensors"), folder / "controller.safetensors")
    sign(folder)
    assert set(load(folder).controllers) == {None, "label"}


@pytest.mark.parametrize("kind", ["no folder", "empty folder", "no manifest", "a file"])
def test_a_place_without_a_manifest_holds_no_retriever(folder, tmp_path, kind):
    place = folder if kind == "no manifest" else tmp_path / "elsewhere"
    if kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "empty folder":
        place.mkdir()
    elif kind == "a file":
        place.write_text("hello")
    with pytest.raises(NoRetriever, match=r"no manifest\.json.*rcir demo"):
        load(place)


@pytest.mark.parametrize("version", [0, 5, 6, 99, "7", None])
def test_another_format_is_refused_with_both_versions(folder, version):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": version}))
    with pytest.raises(CorruptRetriever, match=f"has format {version}.*reads format 7"):
        load(folder)


@pytest.mark.parametrize("outside", ["../secret", "/etc/hostname", "sub/../gallery.json", ""])
def test_a_manifest_cannot_name_files_outside_the_folder(folder, tmp_path, outside):
    (tmp_path / "secret").write_text("secret")
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][outside] = "0" * 64
    path.write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CorruptRetriever, match="is missing"):
        load(folder)


def test_a_manifest_that_lists_nothing_vouches_for_nothing(folder):
    (folder / "manifest.json").write_text(json.dumps({"format": 7, "files": {}}, indent=1))
    with pytest.raises(CorruptRetriever, match=r"does not list gallery.json"):
        load(folder)
