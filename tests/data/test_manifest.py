"""Sources of pictures beyond folders and tables: WebDataset and Hugging Face data sets."""

import io
import json
import tarfile

import pyarrow as pa
import pytest

from rcir.data import manifest
from rcir.data.manifest import list_pictures, read_manifest, read_place, write_plan
from rcir.errors import InvalidData

CONTENTS = [bytes([65 + number]) * (number + 1) for number in range(5)]


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_dataset(folder, contents, features, **columns):
    """Write Arrow files as `save_to_disk` does, two rows a batch."""
    folder.mkdir(parents=True)
    images = [{"bytes": content, "path": None} for content in contents]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(images, kind), **columns})
    info = {"info": {"features": {"image": {"_type": "Image"}, **features}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    place = str(folder / "data-0.arrow")
    with pa.OSFile(place, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": "data-0.arrow"}], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))


def planned(source, folder):
    """Return the ids, columns and bytes of all pictures by a plan, of which two rows are read."""
    plan = write_plan(folder / "plan.parquet", read_manifest(source))
    parts = [plan.rows(start, min(start + 2, len(plan))) for start in range(0, len(plan), 2)]
    read = [read_place(*place) for places, _ in parts for place in places]
    columns = pa.concat_tables([table for _, table in parts]).to_pydict()
    return columns.pop("id"), columns, read


@pytest.mark.parametrize("chunk", [2, 8192])
def test_pictures_of_webdataset_shards_are_read_in_place(tmp_path, chunk, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", chunk)
    folder = tmp_path / "shards"
    folder.mkdir()
    first = {"a/1.jpg": CONTENTS[0], "a/1.cls": b"7", "a/2.json": b"{}", "b.v2.png": CONTENTS[1]}
    write_tar(folder / "0.tar", first)
    write_tar(folder / "1.tar", {f"{n}.JPEG": CONTENTS[n] for n in (2, 3, 4)})
    ids, columns, read = planned(folder, tmp_path)
    assert (ids, columns) == (["a/1", "b", "2", "3", "4"], {"label": ["7", *[None] * 4]})
    assert planned(folder / "1.tar", tmp_path)[1] == {}  # no labels, no column
    assert read == CONTENTS
    assert list_pictures(folder).notes == ("left out: samples without a picture (1)",)
    assert list_pictures(folder / "1.tar").ids == ["2", "3", "4"]
    write_tar(folder / "2.tar", {"2.jpg": b"again"})
    with pytest.raises(InvalidData, match="twice, such as 2, row 6"):
        list_pictures(folder)
    (folder / "2.tar").write_bytes(b"no archive")
    with pytest.raises(InvalidData, match=r"2\.tar"):
        list_pictures(folder)


def test_pictures_of_a_hugging_face_data_set_are_read_in_place(tmp_path):
    classes = {"label": {"_type": "ClassLabel", "names": ["fig", "plum"]}}
    labels = {"label": [0, 1, -1], "weight": [0.5, None, 2.0]}
    write_dataset(tmp_path / "set/train", CONTENTS[:3], classes, **labels)
    write_dataset(tmp_path / "set/test", CONTENTS[3:], classes, label=[1, 1], weight=[1.0, 3.0])
    (tmp_path / "set/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    ids, columns, read = planned(tmp_path / "set", tmp_path)
    assert ids == ["train/0", "train/1", "train/2", "test/0", "test/1"]
    assert columns == {
        "weight": [0.5, None, 2.0, 1.0, 3.0],
        "label": ["fig", "plum", None, "plum", "plum"],
        "split": ["train"] * 3 + ["test"] * 2,
    }
    assert read == CONTENTS
    assert planned(tmp_path / "set/test", tmp_path)[0] == ["0", "1"]
    write_dataset(tmp_path / "numbers", [b"x"], {"image": {"_type": "Value"}})
    with pytest.raises(InvalidData, match="no column of images"):
        read_manifest(tmp_path / "numbers")


def test_columns_of_data_sets_are_read_by_the_rules_of_tables(tmp_path):
    columns = {"label": [7, 8, 7], "labels": [[1], [], [2, 3]], "x": ["1", "2.5", "3"]}
    write_dataset(tmp_path / "set", CONTENTS[:3], {}, **columns, y=[1, 2, 3])
    assert planned(tmp_path / "set", tmp_path)[1] == {
        **{"label": ["7", "8", "7"], "labels": [["1"], [], ["2", "3"]]},
        **{"x": [1.0, 2.5, 3.0], "y": [1.0, 2.0, 3.0]},
    }
    classes = {"label": {"_type": "ClassLabel", "names": ["cafe\u0301", "fig"]}}
    write_dataset(tmp_path / "accents", CONTENTS[:2], classes, label=[0, 1])
    assert planned(tmp_path / "accents", tmp_path)[1] == {"label": ["caf\u00e9", "fig"]}
    write_dataset(tmp_path / "test", CONTENTS[:2], classes, label=[-1, -1])
    assert planned(tmp_path / "test", tmp_path)[1] == {}
    wrong = {"number": (classes, {"label": [0, 2]}), "text": ({}, {"x": ["1", "east"]})}
    for name, (features, values) in wrong.items():
        write_dataset(tmp_path / name, CONTENTS[:2], features, **values)
        with pytest.raises(InvalidData, match=name if name == "number" else "east"):
            list_pictures(tmp_path / name)


def test_names_of_members_of_archives(tmp_path):
    write_tar(tmp_path / "mac.tar", {"._0.png": b"?", "0.png": CONTENTS[0], "0.cls": b"a\n"})
    assert planned(tmp_path / "mac.tar", tmp_path) == (["0"], {"label": ["a"]}, [CONTENTS[0]])
    write_tar(tmp_path / "latin.tar", {"caf\udce9.png": CONTENTS[0]})
    with pytest.raises(InvalidData, match="UTF-8"):
        list_pictures(tmp_path / "latin.tar")
