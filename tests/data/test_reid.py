import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.reid import read_duke, read_market
from rcir.data.images import read_image
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

# Person and camera of every file, by hand.
MARKET = {
    "bounding_box_train": {
        "0002_c1s1_000451_03.jpg": (2, 1),
        "0002_c6s1_000776_01.jpg": (2, 6),
        "0007_c3s3_077419_03.jpg": (7, 3),
    },
    "query": {"0001_c1s1_001051_00.jpg": (1, 1), "1501_c6s4_001902_00.jpg": (1501, 6)},
    "bounding_box_test": {
        "-1_c1s1_000401_03.jpg": (-1, 1),
        "-1_c2s3_000401_03.jpg": (-1, 2),
        "0000_c1s1_000151_01.jpg": (0, 1),
        "0001_c2s1_000301_00.jpg": (1, 2),
        "1501_c3s3_000001_01.jpg": (1501, 3),
    },
}
DUKE = {
    "bounding_box_train": {
        "0001_c2_f0046182.jpg": (1, 2),
        "0011_c8_f0055133.jpg": (11, 8),
    },
    "query": {"0005_c2_f0046985.jpg": (5, 2)},
    "bounding_box_test": {"0005_c10_f0056701.jpg": (5, 10), "0002_c1_f0044158.jpg": (2, 1)},
}


def write(folder, parts):
    for part, files in parts.items():
        (folder / part).mkdir(parents=True)
        for name in files:
            Image.new("RGB", (64, 128)).save(folder / part / name)
    return folder


def check(folder, part, name, files):
    kept = sorted(file for file, (person, _) in files.items() if person != -1)
    assert list(part.ids) == [f"{name}/{file}" for file in kept]
    assert part.images == [folder / name / file for file in kept]
    assert part.labels.tolist() == [files[file][0] for file in kept]
    assert part.attributes["camera"].tolist() == [files[file][1] for file in kept]
    if folder.name == "Market-1501-v15.09.15":
        # The field of the name that tells the camera tells the camera's sequence too.
        assert part.attributes["sequence"].tolist() == [file.split("_")[1] for file in kept]
        assert part.cluster == "sequence"
    else:
        assert "sequence" not in part.attributes
        assert part.cluster is None
    assert part.labels.dtype == part.attributes["camera"].dtype == np.int64
    assert read_image(part.images[0], 3).shape == (128, 64, 3)


@pytest.mark.parametrize(
    ("read", "name", "files"),
    [
        (read_market, "Market-1501-v15.09.15", MARKET),
        (read_duke, "DukeMTMC-reID", DUKE),
    ],
    ids=["market", "duke"],
)
def test_person_and_camera_are_read_from_the_names(tmp_path, read, name, files):
    folder = write(tmp_path / name, files)
    source = read(tmp_path)
    assert isinstance(source.gallery, ImageSet)
    parts = dict(zip(files, (source.train, source.queries, source.gallery), strict=True))
    for part, images in parts.items():
        check(folder, images, part, files[part])


def test_junk_is_left_out_and_distractors_match_nothing(tmp_path):
    write(tmp_path / "Market-1501-v15.09.15", MARKET)
    (tmp_path / "Market-1501-v15.09.15" / "query" / "Thumbs.db").touch()
    source = read_market(tmp_path)
    assert source.notes == (
        "2 images of person -1 were left out",
        "1 files that do not end in .jpg were left out",
    )
    assert source.gallery.labels.tolist() == [0, 1, 1501]
    assert source.queries.relevance.totals(source.gallery.relevance).tolist() == [1, 1]
    write(tmp_path / "DukeMTMC-reID", DUKE)
    assert read_duke(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (read_market, "Market-1501-v15.09.15: bounding_box_train, query, bounding_box_test; get"),
        (read_duke, "DukeMTMC-reID: bounding_box_train, query, bounding_box_test; its authors"),
    ],
    ids=["market", "duke"],
)
def test_missing_folders_are_named(tmp_path, read, said):
    with pytest.raises(DataUnavailable, match=said):
        read(tmp_path)


def test_one_missing_folder_is_named(tmp_path):
    write(tmp_path / "DukeMTMC-reID", {part: DUKE[part] for part in list(DUKE)[:2]})
    with pytest.raises(DataUnavailable, match="DukeMTMC-reID: bounding_box_test;"):
        read_duke(tmp_path)


@pytest.mark.parametrize("files", [(), ("-1_c1s1_000401_03.jpg",), ("notes.txt",)], ids=str)
def test_a_folder_without_people_is_refused(tmp_path, files):
    folder = write(tmp_path / "Market-1501-v15.09.15", MARKET | {"query": {}})
    for name in files:
        (folder / "query" / name).touch()
    with pytest.raises(InvalidData, match="query has no images of people"):
        read_market(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["cat.jpg", "0002.jpg", "-2_c1s1_000401_03.jpg", "x_c1s1.jpg", "0002_cs1_1.jpg", "2 _c1s1.jpg"],
)
def test_an_image_of_another_name_is_refused(tmp_path, name):
    folder = write(tmp_path / "Market-1501-v15.09.15", MARKET)
    (folder / "bounding_box_train" / name).touch()
    with pytest.raises(InvalidData, match=f"bounding_box_train/{name}: a name starts with person"):
        read_market(tmp_path)
