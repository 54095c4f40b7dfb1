"""Folders of a retriever that were damaged."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from rcir.errors import CorruptRetriever, MissingClass, NoRetriever
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import earlier_calibration
from rcir.store.folder import FORMAT, current_version
from tests.retrieval.retrievers import build, calibrate, plain, retrieve
from tests.retrieval.whole_numbers import TEST


def files(folder, suffix=""):
    """The files of a folder besides its manifest."""
    paths = sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file())
    return [path for path in paths if path.name != "manifest.json"]


@pytest.fixture(scope="module")
def saved(retriever, tmp_path_factory):
    """Versions of a retriever of images and of one of vectors."""
    folders, vectors = tmp_path_factory.mktemp("saved"), calibrate(build(depth=40))
    return {
        "images": current_version(retriever.save(folders / "images")),
        "vectors": current_version(vectors.save(folders / "vectors")),
    }


@pytest.fixture(params=["vectors", "images"])
def edited(request, saved, tmp_path):
    return shutil.copytree(saved[request.param], tmp_path / "copy")


@pytest.fixture
def vectors(saved, tmp_path):
    """The folder of vectors alone, which is read faster."""
    return shutil.copytree(saved["vectors"], tmp_path / "copy")


def refuses(folder, *words):
    with pytest.raises(CorruptRetriever) as caught:
        Retriever.load(folder)
    assert all(word in str(caught.value) for word in words)


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def change_byte(content, share, bit=1):
    place = int(share * (len(content) - 1))
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def test_a_changed_shortened_or_missing_file_is_refused(edited):
    for path in files(edited):
        content = path.read_bytes()
        for wrong in (content[:-1], *(change_byte(content, share) for share in (0, 0.1, 0.9, 1))):
            path.write_bytes(wrong)
            refuses(edited, path.name)
        path.unlink()
        refuses(edited, path.name)
        path.write_bytes(content)
    Retriever.load(edited)


def test_any_changed_byte_of_the_manifest_is_refused(vectors):
    path = vectors / "manifest.json"
    original = path.read_bytes()
    for place, byte in list(enumerate(original))[::8]:
        other = ord("\t") if byte in b" \n" else byte ^ 0x01  # JSON reads white space as the same
        path.write_bytes(original[:place] + bytes([other]) + original[place + 1 :])
        refuses(vectors)


@pytest.mark.parametrize("kind", ["no folder", "empty folder", "no manifest", "a file"])
def test_a_place_without_a_manifest_holds_no_retriever(vectors, tmp_path, kind):
    place = vectors if kind == "no manifest" else tmp_path / "elsewhere"
    if kind == "no manifest":
        (place / "manifest.json").unlink()
    elif kind == "empty folder":
        place.mkdir()
    elif kind == "a file":
        place.write_text("hello")
    with pytest.raises(NoRetriever, match="manifest"):
        Retriever.load(place)


def test_an_invalid_pointer_is_refused_and_kept(tmp_path):
    retriever, name = build(), "20260101T000000Z-00000000"
    folder = retriever.save(tmp_path / "own")
    values = {"format": FORMAT, "version": name, "previous": None}
    other = [values | change for change in ({"version": "../own"}, {"format": 1}, {"more": 1})]
    for content in ("", "[]", "[" * 100_000, *map(json.dumps, other)):
        (folder / "current.json").write_text(content)
        for use in (Retriever.load, retriever.save):
            with pytest.raises(CorruptRetriever):
                use(folder)
        assert (folder / "current.json").read_text() == content


@pytest.mark.parametrize("missing", ["", "manifest.json"])
def test_a_missing_current_version_is_refused_and_can_be_replaced(tmp_path, missing):
    retriever = build()
    folder = retriever.save(tmp_path / "own")
    (current_version(folder) / missing).rename(tmp_path / "elsewhere")
    refuses(folder, "manifest.json", "missing")
    assert earlier_calibration(folder) is None
    Retriever.load(retriever.save(folder))


@pytest.mark.parametrize("version", [0, 8, "1", None])
def test_another_format_is_refused(vectors, version):
    edit_manifest(vectors, format=version)
    refuses(vectors, f"format {version!r}", "calibrate again")


@pytest.mark.parametrize("outside", ["../secret", "/etc/hostname", "sub/../retriever.json", ""])
def test_a_manifest_cannot_name_files_outside_the_folder(vectors, tmp_path, outside):
    (tmp_path / "secret").write_text("secret")
    listed = json.loads((vectors / "manifest.json").read_text())["files"]
    edit_manifest(vectors, files=listed | {outside: "0" * 64})
    refuses(vectors, "missing")


# Files with right checksums that something else wrote


def test_a_missing_class_of_another_package_does_not_make_the_folder_invalid(vectors, sign):
    path = vectors / "retriever.json"
    values = json.loads(path.read_text())
    values["gallery"]["relevance"]["class"] = "absent:Relevance"
    path.write_text(json.dumps(values))
    sign(vectors)
    with pytest.raises(MissingClass, match="absent:Relevance"):
        Retriever.load(vectors, trust_code=True)


INCONSISTENT = {
    "encoder": lambda values, _: values.update(encoder={"method": "btl"}),
    "preprocessing": lambda values, _: values.update(preprocessing={}),
    "no rule": lambda values, _: values["calibration"].update(rules=[]),
    "chosen_among is 0": lambda values, _: values["calibration"].update(chosen_among=0),
    "attempts 0": lambda values, _: values["calibration"].update(attempts=0),
    "3 of 2": lambda values, _: set_coverage(values, 3, 2),
    "-1 of 2": lambda values, _: set_coverage(values, -1, 2),
    "0 of 0": lambda values, _: set_coverage(values, 0, 0),
    "'doubt'": lambda _, rule: rule.update(uncertainty="doubt"),
    "calibration queries": lambda _, rule: rule.update(evidence=rule["tuned"]),
}


def set_coverage(values, uncalibrated, labels):
    values["calibration"]["coverage"] = {"uncalibrated": uncalibrated, "labels": labels}


@pytest.mark.parametrize("word", INCONSISTENT)
def test_values_that_contradict_each_other_are_refused(vectors, sign, word):
    path = vectors / "retriever.json"
    values = json.loads(path.read_text())
    ((_, rules),) = values["calibration"]["rules"][:1]
    INCONSISTENT[word](values, rules["fitted"]["miss"])
    path.write_text(json.dumps(values))
    sign(vectors)
    refuses(vectors, "although its checksums are right", word)


def test_a_folder_with_other_files_of_the_same_content_is_read(vectors, sign):
    expected = plain(retrieve(Retriever.load(vectors), 0.5, part=TEST[:3]))
    for path in files(vectors, ".safetensors"):
        save_file(load_file(path), path)
    sign(vectors)
    assert plain(retrieve(Retriever.load(vectors), 0.5, part=TEST[:3])) == expected


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "[" * 100_000, "\x00"])
def test_files_that_cannot_be_read_are_refused(vectors, sign, content):
    for path in [*files(vectors, ".json"), vectors / "retriever.safetensors"]:
        original = path.read_bytes()
        path.write_text(content)
        sign(vectors)
        refuses(vectors, "although its checksums are right")
        path.write_bytes(original)
