"""Readers of published sets of image files with labels, on small copies of their layouts."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from rcir.data.division import divide
from rcir.errors import DataUnavailable, InvalidData
from tests.data.small_sets import cells, labels_of, read, replace_in, touch, write_lines


@dataclass
class Layout:
    """A small set: the folder that ids start at, and the label of each image by part and id."""

    folder: Path
    train: dict
    queries: dict
    gallery: dict | str = "queries"
    class_of: object = None  # the attribute "class" of an id
    notes: tuple = ()


def write_cub(root, classes=4, each=3, first=1):
    folder = root / "CUB_200_2011"
    kinds = [f"{k:03d}.Bird_{k}" for k in range(first, first + classes)]
    names = [f"{kind}/Bird_{n:04d}.jpg" for kind in kinds for n in range(each)]
    touch(folder / "images", names)
    write_lines(folder / "classes.txt", [f"{k} {kind}" for k, kind in enumerate(kinds, first)])
    write_lines(folder / "images.txt", [f"{n} {name}" for n, name in enumerate(names, 1)])
    labels = [f"{n} {int(name[:3])}" for n, name in enumerate(names, 1)]
    # The order of the lines is of no consequence.
    write_lines(folder / "image_class_labels.txt", labels[::-1])
    parts = {name: int(name[:3]) for name in names}
    trains = {name: k for name, k in parts.items() if k < first + (classes + 1) // 2}
    queries = {name: k for name, k in parts.items() if name not in trains}
    return Layout(folder / "images", trains, queries, class_of=lambda name: name.split("/")[0])


CARS = [f"Car {n} 2012" for n in range(1, 197)]
CARS_TRAIN = {"00001.jpg": 14, "00002.jpg": 98, "00003.jpg": 99}
CARS_TEST = {"00001.jpg": 196, "00002.jpg": 1}


def write_annotations(path, labels, name_field="fname", place="", **more):
    """An annotation file of Stanford Cars; a label of None stands for a file without labels."""
    kinds = [(side, "O") for side in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")]
    with_class = [] if None in labels.values() else [("class", "O")]
    rows = np.empty((1, len(labels)), [*kinds, *with_class, (name_field, "O")])
    for column, (name, label) in enumerate(labels.items()):
        values = [np.uint8(label)] if with_class else []
        rows[0, column] = (1, 2, 3, 4, *values, place + name)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": rows} | more)


def write_cars(root, place="devkit", labelled_place="devkit", train=None, test=None):
    folder = root / "stanford_cars"
    train, test = train or CARS_TRAIN, test or CARS_TEST
    write_annotations(folder / place / "cars_train_annos.mat", train)
    savemat(folder / place / "cars_meta.mat", {"class_names": cells(CARS)})
    write_annotations(folder / labelled_place / "cars_test_annos_withlabels.mat", test)
    parts = {f"cars_train/{name}": label for name, label in train.items()}
    parts |= {f"cars_test/{name}": label for name, label in test.items()}
    touch(folder, parts)
    trains = {name: label for name, label in parts.items() if label is not None and label <= 98}
    queries = {name: label for name, label in parts.items() if name not in trains}
    return Layout(folder, trains, queries, class_of=lambda name: f"Car {parts[name]} 2012")


def write_cars_in_one_file(root):
    folder = root / "stanford_cars"
    labels = {"000001.jpg": 1, "000002.jpg": 99, "000003.jpg": 98}
    write_annotations(
        folder / "cars_annos.mat", labels, "relative_im_path", "car_ims/", class_names=cells(CARS)
    )
    parts = {f"car_ims/{name}": label for name, label in labels.items()}
    touch(folder, parts)
    queries = {"car_ims/000002.jpg": parts.pop("car_ims/000002.jpg")}
    return Layout(folder, parts, queries)


SOP_HEADER = "image_id class_id super_class_id path"


def write_sop(root):
    folder, number, halves = root / "Stanford_Online_Products", 0, []
    for file, products in (("Ebay_train.txt", (1, 2, 3)), ("Ebay_test.txt", (11319, 11320))):
        half, lines = {}, [SOP_HEADER]
        for product in products:
            for n in range(4):
                number += 1
                name = f"bicycle_final/{111085122871 + product}_{n}.JPG"
                lines.append(f"{number} {product} 1 {name}")
                half[name] = product
        write_lines(folder / file, lines)
        touch(folder, half)
        halves.append(half)
    return Layout(folder, *halves)


PEOPLE = {
    "peopleDevTrain.txt": {"Zico": 2, "Aaron_Eckhart": 1, "Abdullah": 3},
    "peopleDevTest.txt": {"AJ_Lamas": 1, "Bill_Gates": 2},
}


def write_lfw(root, images="lfw", lists="lfw"):
    numbers = {name: n for n, name in enumerate(sorted(set().union(*PEOPLE.values())))}
    halves = []
    for file, people in PEOPLE.items():
        half = {
            f"{name}/{name}_{k:04d}.jpg": numbers[name]
            for name, n in people.items()
            for k in range(1, n + 1)
        }
        touch(root / images, half)
        lines = [str(len(people)), *(f"{name}\t{n}" for name, n in people.items())]
        write_lines(root / lists / file, lines)
        halves.append(half)
    return Layout(root / images, *halves, class_of=lambda name: name.split("/")[0])


CLOTHES = {
    "train": {"images/0/00/1,1.jpg": 0, "images/0/01/2,2.jpg": 13},
    "val": {"images/1/00/3,3.jpg": 4, "images/1/00/4,4.jpg": 5},
    "test": {"images/2/00/5,5.jpg": 5, "images/2/00/6,6.jpg": 4, "images/2/01/7,7.jpg": 4},
}
NOISY = {"images/3/00/8,8.jpg": 2, "images/3/00/9,9.jpg": 3}


def write_clothing1m(root, place="annotations", also_noisy=()):
    """The noisy labels cover the clean images too, and are all wrong there."""
    folder = root / "Clothing1M"
    clean = {name: label for part in CLOTHES.values() for name, label in part.items()}
    for part, labels in CLOTHES.items():
        write_lines(folder / place / f"clean_{part}_key_list.txt", labels)
    write_lines(folder / place / "noisy_train_key_list.txt", [*also_noisy, *NOISY])
    lines = [f"{name} {label}" for name, label in reversed(clean.items())]
    write_lines(folder / place / "clean_label_kv.txt", lines)
    noisy = NOISY | {name: (label + 1) % 14 for name, label in clean.items()}
    write_lines(folder / place / "noisy_label_kv.txt", [f"{k} {v}" for k, v in noisy.items()])
    touch(folder, [*clean, *NOISY])
    return Layout(folder, CLOTHES["train"] | NOISY, CLOTHES["val"], CLOTHES["test"])


# Person and camera of every file.
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


def write_market(root, files=MARKET):
    folder = root / "Market-1501-v15.09.15"
    for part, names in files.items():
        touch(folder / part, names)
        (folder / part).mkdir(parents=True, exist_ok=True)
    parts = [
        {f"{part}/{name}": person for name, (person, _) in names.items() if person != -1}
        for part, names in files.items()
    ]
    return Layout(folder, *parts, notes=("2 images of person -1 were left out",))


WRITERS = {
    "cub200": write_cub,
    "cars196": write_cars,
    "sop": write_sop,
    "lfw": write_lfw,
    "clothing1m": write_clothing1m,
    "market1501": write_market,
}
LAYOUTS = [
    *[(name, writer, ()) for name, writer in WRITERS.items()],
    *[("cars196", write_cars, places) for places in (("devkit", "."), (".", "."))],
    ("cars196", write_cars_in_one_file, ()),
    ("lfw", write_lfw, ("lfw", ".")),
    ("lfw", write_lfw, ("lfw-py/lfw_funneled", "lfw-py")),
    ("lfw", write_lfw, ("lfw-py/lfw-deepfunneled", "lfw-py")),
    ("lfw", write_lfw, ("lfw-py/lfw", "lfw-py/lfw")),
    ("clothing1m", write_clothing1m, (".",)),
]


@pytest.mark.parametrize(("name", "writer", "places"), LAYOUTS)
def test_each_part_has_the_published_images_and_labels(tmp_path, name, writer, places):
    layout = writer(tmp_path, *places)
    source = read(name, tmp_path)
    parts = [(source.train, layout.train), (source.queries, layout.queries)]
    if isinstance(layout.gallery, str):
        assert source.gallery == layout.gallery
    else:
        parts.append((source.gallery, layout.gallery))
    for part, expected in parts:
        assert labels_of(part) == expected
        assert part.labels.dtype == np.int64
        assert part.images == [layout.folder / identifier for identifier in part.ids]
        if layout.class_of:
            assert part.attributes["class"].tolist() == [layout.class_of(i) for i in part.ids]
    assert source.notes == layout.notes


NEEDED = {
    "cub200": "images.txt image_class_labels.txt classes.txt",
    "cars196": "cars_train_annos.mat cars_meta.mat cars_test_annos_withlabels.mat",
    "sop": "Ebay_train.txt Ebay_test.txt",
    "lfw": "peopleDevTrain.txt peopleDevTest.txt",
    "clothing1m": "clean_val_key_list.txt clean_label_kv.txt noisy_label_kv.txt",
}


@pytest.mark.parametrize("name", NEEDED)
def test_missing_files_are_named(tmp_path, name):
    with pytest.raises(DataUnavailable):
        read(name, tmp_path)
    for file in NEEDED[name].split():
        WRITERS[name](tmp_path / file)
        next((tmp_path / file).rglob(file)).unlink()
        with pytest.raises(DataUnavailable, match=file):
            read(name, tmp_path / file)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_image_is_named(tmp_path, name):
    layout = WRITERS[name](tmp_path)
    image = list(layout.queries)[-1]
    (layout.folder / image).unlink()
    with pytest.raises(DataUnavailable, match=rf"\b1 of \d+ .*{image}"):
        read(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "word"),
    [
        ("cub200", "images.txt", "2 001.Bird_1/Bird_0001.jpg", "2", "line 2"),
        ("cub200", "images.txt", "2 001", "99 001", "in one of them only"),
        ("cub200", "images.txt", None, " \n", "empty"),
        ("cub200", "image_class_labels.txt", "12 4\n", "", "in one of them only"),
        ("cub200", "image_class_labels.txt", "12 4\n", "12 x\n", "line 1"),
        ("cub200", "image_class_labels.txt", "12 4\n", f"12 {'9' * 19}\n", "line 1"),
        ("cub200", "image_class_labels.txt", "12 4\n", "12 9\n", "class 9"),
        ("cub200", "classes.txt", "2 002.Bird_2", "1 002.Bird_2", "twice"),
        ("sop", "Ebay_train.txt", SOP_HEADER + "\n", "", "line 1"),
        ("sop", "Ebay_train.txt", "\n2 1 1 ", "\n2 1 ", "line 3"),
        ("sop", "Ebay_test.txt", " 11320 ", " 3 ", "both"),
        ("sop", "Ebay_test.txt", None, SOP_HEADER, "nothing"),
        ("lfw", "peopleDevTrain.txt", "Zico\t2", "Zico", "line 2"),
        ("lfw", "peopleDevTrain.txt", "3\n", "4\n", "announces 4"),
        ("lfw", "peopleDevTrain.txt", "Zico\t2", "Zico\t0", "no picture"),
        ("lfw", "peopleDevTrain.txt", "Zico\t2", "Zico\t10000", "10000"),
        ("lfw", "peopleDevTrain.txt", "Abdullah", "Zico", "twice"),
        ("lfw", "peopleDevTrain.txt", "Abdullah", "Bill_Gates", "both"),
        ("clothing1m", "clean_val_key_list.txt", None, "a.jpg\n", r"a\.jpg"),
        ("clothing1m", "clean_val_key_list.txt", "images/1/00/3,3", "images/2/00/5,5", "twice"),
        ("clothing1m", "clean_label_kv.txt", None, "a.jpg 13\nb.jpg 14\n", "line 2"),
        ("clothing1m", "noisy_label_kv.txt", None, "a.jpg 1\na.jpg 2\n", "twice"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, name, file, old, new, word):
    folder = WRITERS[name](tmp_path).folder
    folder = {"cub200": folder.parent, "clothing1m": folder / "annotations"}.get(name, folder)
    replace_in(folder / file, old, new)
    with pytest.raises(InvalidData, match=word):
        read(name, tmp_path)


def test_line_ends_and_byte_order_marks_of_any_system_are_read(tmp_path):
    layout = write_cub(tmp_path)
    path = layout.folder.parent / "images.txt"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\n")
    assert labels_of(read("cub200", tmp_path).train) == layout.train
    path.write_bytes(b"1 \xff\xfe")
    with pytest.raises(InvalidData, match="cannot be read"):
        read("cub200", tmp_path)


def test_folders_and_broken_links_are_not_images(tmp_path):
    layout = write_cub(tmp_path)
    first, second = list(layout.train)[:2]
    for name in (first, second):
        (layout.folder / name).unlink()
    (layout.folder / first).mkdir()
    (layout.folder / second).symlink_to("nowhere")
    with pytest.raises(DataUnavailable, match=rf"2 of 12 .*{first}, .*{second}"):
        read("cub200", tmp_path)


# CUB-200-2011


def test_classes_are_halved_in_listed_order_and_only_those_with_images(tmp_path):
    path = write_cub(tmp_path, classes=5, first=7).folder.parent / "classes.txt"
    lines = path.read_text().split("\n")[:5]
    write_lines(path, ["90 090.None", "91 091.None", "92 092.None", *lines[::-1]])
    source = read("cub200", tmp_path)
    assert np.unique(source.train.labels).tolist() == [9, 10, 11]
    assert np.unique(source.queries.labels).tolist() == [7, 8]


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
    for part in (source.train, source.queries):
        assert part.attributes["class"].tolist() == [name.split("/")[0] for name in part.ids]
    splits = divide(source)
    evaluation = (splits.gallery, splits.tuning, splits.calibration, splits.test)
    assert sum(map(len, evaluation)) == len(source.queries)


# Stanford Cars


@pytest.mark.parametrize("test", [{"00001.jpg": 0}, {"00001.jpg": 197}, {"00001.jpg": None}])
def test_labels_outside_of_the_list_of_car_models_are_refused(tmp_path, test):
    write_cars(tmp_path, test=test)
    with pytest.raises(InvalidData, match="labels from 1 to 196"):
        read("cars196", tmp_path)


def test_test_annotations_of_cars_without_labels_are_refused(tmp_path):
    folder = write_cars(tmp_path).folder / "devkit"
    (folder / "cars_test_annos_withlabels.mat").rename(folder / "cars_test_annos.mat")
    with pytest.raises(DataUnavailable, match="no labels"):
        read("cars196", tmp_path)


def test_a_car_listed_twice_is_refused(tmp_path):
    path = write_cars_in_one_file(tmp_path).folder / "cars_annos.mat"
    content = loadmat(path)
    rows = np.concatenate([content["annotations"]] * 2, axis=1)
    savemat(path, {"annotations": rows, "class_names": content["class_names"]})
    with pytest.raises(InvalidData, match="twice"):
        read("cars196", tmp_path)


@pytest.mark.parametrize("file", ["cars_train_annos.mat", "cars_meta.mat"])
@pytest.mark.parametrize("harm", ["text", "cut short", "other variable", "numbers", "fractions"])
def test_damaged_annotations_of_cars_are_refused(tmp_path, file, harm):
    path = write_cars(tmp_path).folder / "devkit" / file
    if harm == "text":
        path.write_text("hello")
    elif harm == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "other variable" or file == "cars_meta.mat":
        savemat(path, {"notes": np.zeros(3)})
    elif harm == "numbers":
        savemat(path, {"annotations": np.zeros(3)})
    else:
        rows = loadmat(path)["annotations"]
        rows["class"][0, 0] = np.array([[1.5]])
        savemat(path, {"annotations": rows})
    with pytest.raises(InvalidData, match=file):
        read("cars196", tmp_path)


@pytest.mark.slow
@pytest.mark.data
def test_both_official_halves_of_cars_are_pooled(data_root, tmp_path):
    devkit = data_root / "annotations" / "cars196"
    (tmp_path / "unlabelled").mkdir()
    (tmp_path / "unlabelled" / "stanford_cars").symlink_to(devkit)
    with pytest.raises(DataUnavailable, match="has no labels"):
        read("cars196", tmp_path / "unlabelled")
    published, test = (
        loadmat(devkit / f"cars_{part}_annos.mat", simplify_cells=True)["annotations"]
        for part in ("train", "test")
    )
    test_labels = {cell["fname"]: row % 196 + 1 for row, cell in enumerate(test)}
    folder = tmp_path / "stanford_cars"
    write_annotations(folder / "devkit" / "cars_test_annos_withlabels.mat", test_labels)
    for name in ("cars_meta.mat", "cars_train_annos.mat"):
        (folder / name).symlink_to(devkit / name)
    expected = {f"cars_train/{cell['fname']}": cell["class"] for cell in published}
    assert len(expected) == 8144
    expected |= {f"cars_test/{name}": label for name, label in test_labels.items()}
    touch(folder, expected)
    source = read("cars196", tmp_path)
    assert labels_of(source.train) | labels_of(source.queries) == expected
    assert len(expected) == 16_185
    assert (source.train.labels.max(), source.queries.labels.min()) == (98, 99)
    names = loadmat(devkit / "cars_meta.mat", simplify_cells=True)["class_names"]
    for part in (source.train, source.queries):
        assert part.attributes["class"].tolist() == names[part.labels - 1].tolist()


# Clothing1M


def test_clean_labels_win_and_are_told_from_noisy_ones(tmp_path):
    write_clothing1m(tmp_path, also_noisy=["images/0/00/1,1.jpg", "images/2/00/5,5.jpg"])
    source = read("clothing1m", tmp_path)
    assert labels_of(source.train) == CLOTHES["train"] | NOISY
    assert source.train.attributes["noisy"].tolist() == [name in NOISY for name in source.train.ids]
    assert not source.queries.attributes["noisy"].any()
    assert not source.gallery.attributes["noisy"].any()
    assert len(source.notes) == 1
    assert source.notes[0].startswith("2 noisy images")
    assert source.queries.relevance.totals(source.gallery.relevance).tolist() == [2, 1]


def test_noisy_files_are_needed_for_noisy_images_only(tmp_path):
    folder = write_clothing1m(tmp_path).folder
    for name in ("noisy_train_key_list.txt", "noisy_label_kv.txt"):
        (folder / "annotations" / name).unlink()
    (folder / "images/3/00/8,8.jpg").unlink()
    assert labels_of(read("clothing1m", tmp_path, noisy=False).train) == CLOTHES["train"]


# Market-1501


def test_cameras_and_sequences_are_read_from_file_names(tmp_path):
    write_market(tmp_path)
    source = read("market1501", tmp_path)
    for part in (source.train, source.queries, source.gallery):
        files = [name.split("/") for name in part.ids]
        cameras = [MARKET[place][name][1] for place, name in files]
        assert part.attributes["camera"].tolist() == cameras
        assert part.attributes["sequence"].tolist() == [name.split("_")[1] for _, name in files]
        assert part.cluster == "sequence"


def test_distractors_match_nothing_and_other_files_are_counted(tmp_path):
    folder = write_market(tmp_path).folder
    (folder / "query" / "Thumbs.db").touch()
    source = read("market1501", tmp_path)
    assert len(source.notes) == 2
    assert source.gallery.labels.tolist() == [0, 1, 1501]
    assert source.queries.relevance.totals(source.gallery.relevance).tolist() == [1, 1]


def test_missing_folders_of_people_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match="bounding_box_train, query, bounding_box_test"):
        read("market1501", tmp_path)
    write_market(tmp_path, {part: MARKET[part] for part in ("bounding_box_train", "query")})
    with pytest.raises(DataUnavailable, match="bounding_box_test"):
        read("market1501", tmp_path)


@pytest.mark.parametrize(
    "name",
    ["cat.jpg", "0002.jpg", "-2_c1s1_000401_03.jpg", "x_c1s1.jpg", "0002_cs1_1.jpg", "2 _c1s1.jpg"],
)
def test_a_file_name_without_person_and_camera_is_refused(tmp_path, name):
    folder = write_market(tmp_path).folder
    (folder / "bounding_box_train" / name).touch()
    with pytest.raises(InvalidData, match=name):
        read("market1501", tmp_path)


# ChestX-Det

CHEST_FILES = ("ChestX_Det_train.json", "ChestX_Det_test.json")
CHEST = (
    {"1.png": ["Effusion", "Fibrosis", "Effusion"], "2.png": [], "3.png": ["Mass"]}
    | {"4.png": ["Effusion", "Nodule"]},
    {"7.png": ["Consolidation"], "8.png": ["Nodule", "Mass"], "9.png": []},
)


def write_chest(root, places=("train_data", "test_data"), halves=CHEST):
    folder = root / "ChestX-Det"
    for name, place, files in zip(CHEST_FILES, places, halves, strict=True):
        entries = [{"file_name": file, "syms": shown, "boxes": []} for file, shown in files.items()]
        write_lines(folder / name, [json.dumps(entries)])
        touch(folder / place, files)
    return folder


@pytest.mark.parametrize("places", [("train_data", "test_data"), ("train", "test")])
def test_x_rays_with_a_training_finding_or_none_train(tmp_path, places):
    folder = write_chest(tmp_path, places)
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
    write_chest(tmp_path, halves=(single, {"last.png": ["Mass"]}))
    train = read("chestx-det", tmp_path).train.ids
    mask = 0b110001111
    assert list(train) == [f"train_data/{i}.png" for i in range(14) if mask >> i & 1]


def test_missing_annotations_and_x_rays_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=", ".join(CHEST_FILES)):
        read("chestx-det", tmp_path)
    (write_chest(tmp_path) / "test_data" / "8.png").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 7 .*test_data/8\.png"):
        read("chestx-det", tmp_path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "list"),
        ("[3]", "entry 1"),
        ('[{"file_name": "1.png"}]', "entry 1"),
        ('[{"file_name": "1.png", "syms": ["mass"]}]', "'mass'"),
        ('[{"file_name": "1.png", "syms": [["Mass"]]}]', "'Mass'"),
        ('[{"file_name": "1.png", "syms": []}, {"file_name": "1.png", "syms": []}]', "twice"),
    ],
    ids=range(8),
)
def test_findings_of_the_wrong_form_are_refused(tmp_path, content, word):
    (write_chest(tmp_path) / CHEST_FILES[0]).write_text(content)
    with pytest.raises(InvalidData, match=word):
        read("chestx-det", tmp_path)


ONE_CAR = {"train": {"00002.jpg": 98}, "test": {"00001.jpg": 1}}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("cub200", lambda root: write_cub(root, classes=1)),
        ("cars196", lambda root: write_cars(root, **ONE_CAR)),
        *[
            ("market1501", lambda root, files=files: write_market(root, MARKET | {"query": files}))
            for files in ({}, {"-1_c1s1_000401_03.jpg": (-1, 1)}, {"notes.txt": (1, 1)})
        ],
        *[
            ("chestx-det", lambda root, x=x: write_chest(root, halves=({"1.png": x}, {"2.png": x})))
            for x in (["Mass"], ["Emphysema"], [])
        ],
    ],
)
def test_a_set_without_images_of_a_split_is_refused(tmp_path, name, write):
    write(tmp_path)
    with pytest.raises(InvalidData, match=r"\(0\).*each split needs some"):
        read(name, tmp_path)
