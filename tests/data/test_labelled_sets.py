"""Readers of published sets of image files with labels, on small copies of their layouts."""

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from rcir.errors import DataUnavailable, InvalidData
from tests.data.small_sets import cells, labels_of, read, replace_in, touch, write_lines


class Layout(NamedTuple):
    """A small set: its folder, the one inside that ids start at, index files, labels by id."""

    folder: str
    images: str
    files: dict  # the lines of texts, and the variables of MATLAB files
    train: dict
    queries: dict
    gallery: dict | None = None
    attributes: dict[str, Callable] | None = None  # the values, from id and label
    cluster: str | None = None
    left_out: tuple = ()
    notes: tuple = ()


def write(root, layout):
    """Write a small set; its folder."""
    folder = root / layout.folder
    for name, content in layout.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (savemat if isinstance(content, dict) else write_lines)(folder / name, content)
    images = [*layout.train, *layout.queries, *(layout.gallery or ()), *layout.left_out]
    touch(folder / layout.images, images)
    return folder


OWLS, JAYS, TITS = (f"00{number}.{name}" for number, name in enumerate(("Owl", "Jay", "Tit"), 1))
CUB = Layout(
    "CUB_200_2011",
    "images",
    {
        "classes.txt": [f"1 {OWLS}", f"2 {JAYS}", f"3 {TITS}"],
        "images.txt": [f"1 {OWLS}/a.jpg", f"2 {OWLS}/b.jpg", f"3 {JAYS}/a.jpg", f"4 {TITS}/a.jpg"],
        # The order of the lines is of no consequence.
        "image_class_labels.txt": ["4 3", "1 1", "3 2", "2 1"],
    },
    {f"{OWLS}/a.jpg": 1, f"{OWLS}/b.jpg": 1, f"{JAYS}/a.jpg": 2},
    {f"{TITS}/a.jpg": 3},
    attributes={"class": lambda name, _: name.split("/")[0]},
)
CARS = cells([f"Car {n} 2012" for n in range(1, 197)])
CAR_NAME = {"class": lambda _, label: f"Car {label} 2012"}


def annotations(labels, fields=("class", "fname"), kind=np.uint8):
    """The variable of Stanford Cars with the label of each file."""
    rows = [(kind(label), name) for name, label in labels.items()]
    return {"annotations": np.array([rows], [(field, "O") for field in fields])}


def cars(place="devkit", labelled_place="devkit"):
    test = annotations({"00001.jpg": 196, "00002.jpg": 1})
    files = {
        f"{place}/cars_train_annos.mat": annotations(
            {"00001.jpg": 14, "00002.jpg": 98, "00003.jpg": 99}
        ),
        f"{place}/cars_meta.mat": {"class_names": CARS},
        f"{labelled_place}/cars_test_annos_withlabels.mat": test,
    }
    trains = {"cars_train/00001.jpg": 14, "cars_train/00002.jpg": 98, "cars_test/00002.jpg": 1}
    queries = {"cars_train/00003.jpg": 99, "cars_test/00001.jpg": 196}
    return Layout("stanford_cars", ".", files, trains, queries, attributes=CAR_NAME)


CARS_IN_ONE_FILE = Layout(
    "stanford_cars",
    ".",
    {
        "cars_annos.mat": {"class_names": CARS}
        | annotations({"car_ims/1.jpg": 1, "car_ims/2.jpg": 99}, ("class", "relative_im_path"))
    },
    {"car_ims/1.jpg": 1},
    {"car_ims/2.jpg": 99},
    attributes=CAR_NAME,
)
SOP_HEADER = "image_id class_id super_class_id path"
SOP = Layout(
    "Stanford_Online_Products",
    ".",
    {
        "Ebay_train.txt": [SOP_HEADER, *(f"{n} {n // 3 + 1} 1 bike/{n}.JPG" for n in range(1, 5))],
        "Ebay_test.txt": [SOP_HEADER, "5 11319 2 chair/5.JPG", "6 11320 2 chair/6.JPG"],
    },
    {"bike/1.JPG": 1, "bike/2.JPG": 1, "bike/3.JPG": 2, "bike/4.JPG": 2},
    {"chair/5.JPG": 11319, "chair/6.JPG": 11320},
)


def sequence(name, _):
    return name.split("/")[1].split("_")[1]


MARKET = Layout(
    "Market-1501-v15.09.15",
    ".",
    {},
    {
        "bounding_box_train/0002_c1s1_000451_03.jpg": 2,
        "bounding_box_train/0002_c6s1_000776_01.jpg": 2,
        "bounding_box_train/0007_c3s3_077419_03.jpg": 7,
    },
    {"query/0001_c1s1_001051_00.jpg": 1, "query/1501_c6s4_001902_00.jpg": 1501},
    {
        "bounding_box_test/0000_c1s1_000151_01.jpg": 0,
        "bounding_box_test/0001_c2s1_000301_00.jpg": 1,
        "bounding_box_test/1501_c3s3_000001_01.jpg": 1501,
    },
    {"sequence": sequence, "camera": lambda *each: int(sequence(*each)[1])},
    "sequence",
    tuple(f"bounding_box_test/-1_c{n}s3_000401_03.jpg" for n in (1, 2)),
    ("2 images of person -1 were left out",),
)
CHEST = (
    {"1.png": ["Effusion", "Fibrosis", "Effusion"], "2.png": [], "3.png": ["Mass"]}
    | {"4.png": ["Effusion", "Nodule"]},
    {"7.png": ["Consolidation"], "8.png": ["Nodule", "Mass"], "9.png": []},
)


def chest(places=("train_data", "test_data"), halves=CHEST):
    files = {}
    for part, half in zip(("train", "test"), halves, strict=True):
        entries = [{"file_name": name, "syms": shown, "boxes": []} for name, shown in half.items()]
        files[f"ChestX_Det_{part}.json"] = [json.dumps(entries)]
    images = (
        dict.fromkeys(f"{p}/{name}" for name in h) for p, h in zip(places, halves, strict=True)
    )
    return Layout("ChestX-Det", ".", files, *images)


SETS = {
    **{"cub200": CUB, "cars196": cars(), "sop": SOP},
    **{"market1501": MARKET, "chestx-det": chest()},
}
LAYOUTS = [
    *[(name, layout) for name, layout in SETS.items() if name != "chestx-det"],
    *[("cars196", cars("devkit", ".")), ("cars196", cars(".", ".")), ("cars196", CARS_IN_ONE_FILE)],
]


@pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name} {next(iter(x.files), '')}" for name, x in LAYOUTS]
)
def test_each_part_has_the_published_images_and_labels(tmp_path, name, layout):
    folder = write(tmp_path, layout) / layout.images
    source = read(name, tmp_path)
    parts = [(source.train, layout.train), (source.queries, layout.queries)]
    if layout.gallery is None:
        assert source.gallery == "queries"
    else:
        parts.append((source.gallery, layout.gallery))
    for part, expected in parts:
        assert labels_of(part) == expected
        assert part.labels.dtype == np.int64
        assert part.images == [folder / identifier for identifier in part.ids]
        assert {name: values.tolist() for name, values in part.attributes.items()} == {
            name: [value(each, expected[each]) for each in part.ids]
            for name, value in (layout.attributes or {}).items()
        }
        assert part.cluster == layout.cluster
    assert source.notes == layout.notes


NEEDED = {
    "cub200": "images.txt image_class_labels.txt classes.txt",
    "cars196": "cars_train_annos.mat cars_meta.mat cars_test_annos_withlabels.mat",
    "sop": "Ebay_train.txt Ebay_test.txt",
    "chestx-det": "ChestX_Det_train.json ChestX_Det_test.json",
}


@pytest.mark.parametrize("name", NEEDED)
def test_missing_files_and_images_are_named(tmp_path, name):
    layout = SETS[name]
    with pytest.raises(DataUnavailable):
        read(name, tmp_path)
    for file in NEEDED[name].split():
        write(tmp_path / file, layout)
        next((tmp_path / file).rglob(file)).unlink()
        with pytest.raises(DataUnavailable, match=file):
            read(name, tmp_path / file)
    image = list(layout.queries)[-1]
    (write(tmp_path, layout) / layout.images / image).unlink()
    with pytest.raises(DataUnavailable, match=rf"\b1 of \d+ .*{image}"):
        read(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "word"),
    [
        ("cub200", "images.txt", f"2 {OWLS}/b.jpg", "2", "line 2"),
        ("cub200", "images.txt", "2 001", "99 001", "in one of them only"),
        ("cub200", "images.txt", None, " \n", "empty"),
        ("cub200", "image_class_labels.txt", "4 3\n", "", "in one of them only"),
        ("cub200", "image_class_labels.txt", "4 3\n", "4 x\n", "line 1"),
        ("cub200", "image_class_labels.txt", "4 3\n", f"4 {10**18}\n", "line 1"),
        ("cub200", "image_class_labels.txt", "4 3\n", "4 9\n", "class 9"),
        ("cub200", "classes.txt", f"2 {JAYS}", f"1 {JAYS}", "twice"),
        ("sop", "Ebay_train.txt", SOP_HEADER + "\n", "", "line 1"),
        ("sop", "Ebay_train.txt", "\n2 1 1 ", "\n2 1 ", "line 3"),
        ("sop", "Ebay_test.txt", " 11320 ", " 2 ", "both"),
        ("sop", "Ebay_test.txt", None, SOP_HEADER, "nothing"),
        ("chestx-det", "ChestX_Det_train.json", None, "[", "cannot be read"),
        ("chestx-det", "ChestX_Det_train.json", None, "[" * 100_000, "cannot be read"),
        ("chestx-det", "ChestX_Det_train.json", None, "{}", "list"),
        ("chestx-det", "ChestX_Det_train.json", '[{"file', '[3, {"file', "entry 1"),
        ("chestx-det", "ChestX_Det_train.json", "syms", "findings", "entry 1"),
        ("chestx-det", "ChestX_Det_train.json", "Fibrosis", "fibrosis", "'fibrosis'"),
        ("chestx-det", "ChestX_Det_train.json", '"Mass"', '["Mass"]', "'Mass'"),
        ("cub200", "image_class_labels.txt", None, "4 1\n1 1\n3 1\n2 1\n", r"query \(0\)"),
        ("chestx-det", "ChestX_Det_train.json", "2.png", "1.png", "twice"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, name, file, old, new, word):
    replace_in(next(write(tmp_path, SETS[name]).rglob(file)), old, new)
    with pytest.raises(InvalidData, match=word):
        read(name, tmp_path)


def test_line_ends_and_byte_order_marks_of_any_system_are_read(tmp_path):
    path = write(tmp_path, CUB) / "images.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\n")
    assert labels_of(read("cub200", tmp_path).train) == CUB.train
    path.write_bytes(b"1 \xff\xfe")
    with pytest.raises(InvalidData, match="cannot be read"):
        read("cub200", tmp_path)


def test_folders_and_broken_links_are_not_images(tmp_path):
    folder = write(tmp_path, CUB) / "images"
    first, second, _ = CUB.train
    for name in (first, second):
        (folder / name).unlink()
    (folder / first).mkdir()
    (folder / second).symlink_to("nowhere")
    with pytest.raises(DataUnavailable, match=rf"2 of 4 .*{first}, .*{second}"):
        read("cub200", tmp_path)


# CUB-200-2011


def test_classes_are_halved_in_listed_order_and_only_those_with_images(tmp_path):
    path = write(tmp_path, CUB) / "classes.txt"
    write_lines(path, ["90 090.None", "91 091.None", *reversed(CUB.files["classes.txt"])])
    source = read("cub200", tmp_path)
    assert np.unique(source.train.labels).tolist() == [2, 3]
    assert np.unique(source.queries.labels).tolist() == [1]


@pytest.mark.data
def test_the_official_cub_index_is_halved_at_class_100(data_root, tmp_path):
    folder = data_root / "annotations" / "cub200"
    files = dict(line.split() for line in (folder / "images.txt").read_text().splitlines())
    labels = (folder / "image_class_labels.txt").read_text().splitlines()
    label_of = {files[image]: int(number) for image, number in map(str.split, labels)}
    (tmp_path / "CUB_200_2011").mkdir()
    for file in ("images.txt", "image_class_labels.txt", "classes.txt"):
        (tmp_path / "CUB_200_2011" / file).symlink_to(folder / file)
    with pytest.raises(DataUnavailable, match="11788 of 11788"):
        read("cub200", tmp_path)
    touch(tmp_path / "CUB_200_2011" / "images", label_of)
    source = read("cub200", tmp_path)
    # The published counts of the two halves.
    assert (len(source.train), len(source.queries)) == (5864, 5924)
    assert labels_of(source.train) | labels_of(source.queries) == label_of
    assert (source.train.labels.max(), source.queries.labels.min()) == (100, 101)


# Stanford Cars

CAR_FILES = ("cars_test_annos_withlabels.mat", "cars_train_annos.mat", "cars_meta.mat")


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        *[(CAR_FILES[0], annotations({"1.jpg": n}), "from 1 to 196") for n in (0, 197)],
        (CAR_FILES[0], annotations({"1.jpg": 1.5}, kind=float), "from 1 to 196"),
        (CAR_FILES[0], annotations({"1.jpg": 1}, ("bbox_x1", "fname")), "from 1 to 196"),
        (CAR_FILES[1], {"annotations": np.zeros(3)}, CAR_FILES[1]),
        *[(file, {"notes": np.zeros(3)}, file) for file in CAR_FILES],
    ],
)
def test_damaged_annotations_of_cars_are_refused(tmp_path, file, content, word):
    savemat(write(tmp_path, SETS["cars196"]) / "devkit" / file, content)
    with pytest.raises(InvalidData, match=word):
        read("cars196", tmp_path)


def test_test_annotations_of_cars_without_labels_are_refused(tmp_path):
    folder = write(tmp_path, SETS["cars196"]) / "devkit"
    (folder / CAR_FILES[0]).rename(folder / "cars_test_annos.mat")
    with pytest.raises(DataUnavailable, match="no labels"):
        read("cars196", tmp_path)


@pytest.mark.slow
@pytest.mark.data
def test_the_official_annotations_of_cars_are_read(data_root, tmp_path):
    devkit = data_root / "annotations" / "cars196"
    cells = loadmat(devkit / "cars_train_annos.mat", simplify_cells=True)["annotations"]
    folder = tmp_path / "stanford_cars"
    folder.mkdir()
    savemat(folder / CAR_FILES[0], annotations({"1.jpg": 196}))
    for name in CAR_FILES[1:]:
        (folder / name).symlink_to(devkit / name)
    expected = {f"cars_train/{cell['fname']}": cell["class"] for cell in cells}
    assert len(expected) == 8144
    expected |= {"cars_test/1.jpg": 196}
    touch(folder, expected)
    source = read("cars196", tmp_path)
    assert labels_of(source.train) | labels_of(source.queries) == expected
    assert (source.train.labels.max(), source.queries.labels.min()) == (98, 99)


# Market-1501


def test_distractors_match_nothing_and_other_files_are_counted(tmp_path):
    folder = write(tmp_path, MARKET)
    (folder / "query" / "Thumbs.db").touch()
    source = read("market1501", tmp_path)
    assert len(source.notes) == 2
    assert source.gallery.labels.tolist() == [0, 1, 1501]
    assert source.queries.relevance.totals(source.gallery.relevance).tolist() == [1, 1]
    for name in MARKET.queries:  # only that file, which is not an image, remains
        (folder / name).unlink()
    with pytest.raises(InvalidData, match=r"query \(0\).*each split needs some"):
        read("market1501", tmp_path)


def test_missing_folders_of_people_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match="bounding_box_train, query, bounding_box_test"):
        read("market1501", tmp_path)
    write(tmp_path, MARKET._replace(gallery={}, left_out=()))
    with pytest.raises(DataUnavailable, match="bounding_box_test"):
        read("market1501", tmp_path)


def test_a_file_name_without_person_and_camera_is_refused(tmp_path):
    folder = write(tmp_path, MARKET) / "bounding_box_train"
    for name in ("cat.jpg", "-2_c1s1_000401_03.jpg", "x_c1s1.jpg", "0002_cs1_1.jpg", "2 _c1s1.jpg"):
        (folder / name).touch()
        with pytest.raises(InvalidData, match=name):
            read("market1501", tmp_path)
        (folder / name).unlink()


# ChestX-Det


@pytest.mark.parametrize("places", [("train_data", "test_data"), ("train", "test")])
def test_x_rays_with_a_training_finding_or_none_train(tmp_path, places):
    folder = write(tmp_path, chest(places))
    if places[0] == "train_data":
        (folder / "train").mkdir()  # the archive's folder comes first
    source = read("chestx-det", tmp_path)
    first, second = places
    assert list(source.train.ids) == [f"{first}/1.png", f"{first}/2.png", f"{second}/9.png"]
    assert list(source.queries.ids) == [
        *(f"{first}/3.png", f"{first}/4.png", f"{second}/7.png", f"{second}/8.png")
    ]
    assert source.queries.images == [folder / name for name in source.queries.ids]
    assert source.queries.labels is None
    indptr, columns = source.queries.relevance.pairs(np.arange(4))
    assert indptr.tolist() == [0, 2, 4, 5, 8]
    assert columns.tolist() == [0, 3, 1, 3, 2, 0, 1, 3]
    indptr, columns = source.train.relevance.pairs(np.arange(3))
    assert indptr.tolist() == [0, 1, 3, 5]
    assert columns.tolist() == [0, 1, 2, 1, 2]  # those without a finding match each other
    assert source.gallery == "queries"
    assert not source.notes


def test_the_training_half_is_that_of_the_published_mask(tmp_path):
    """The authors number Normal 0 and the findings from 1 on, by name; the mask is theirs."""
    names = [
        *("Atelectasis", "Calcification", "Cardiomegaly", "Consolidation", "Diffuse Nodule"),
        *("Effusion", "Emphysema", "Fibrosis", "Fracture", "Mass", "Nodule"),
        *("Pleural Thickening", "Pneumothorax"),
    ]
    single = {"0.png": []} | {f"{i}.png": [name] for i, name in enumerate(names, 1)}
    write(tmp_path, chest(halves=(single, {"last.png": ["Mass"]})))
    train = read("chestx-det", tmp_path).train.ids
    mask = 0b110001111
    assert list(train) == [f"train_data/{i}.png" for i in range(14) if mask >> i & 1]
