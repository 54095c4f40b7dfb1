import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.stanford_online_products import read, read_index
from rcir.data.division import divide
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData

HEADER = "image_id class_id super_class_id path"


def write(root, train=(1, 2, 3), test=(11319, 11320), each=4):
    """A small set laid out like the published one; returns (name, class) of each image by half."""
    folder = root / "Stanford_Online_Products"
    image, halves = 0, []
    for file, products in (("Ebay_train.txt", train), ("Ebay_test.txt", test)):
        half, lines = [], [HEADER]
        for product in products:
            for n in range(each):
                image += 1
                name = f"bicycle_final/{111085122871 + product}_{n}.JPG"
                lines.append(f"{image} {product} 1 {name}")
                half.append((name, product))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8 + n, 6), (product % 256, n, 0)).save(folder / name, "jpeg")
        (folder / file).write_text("\n".join(lines) + "\n")
        halves.append(half)
    return folder, halves


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_official_halves_are_read(tmp_path):
    folder, halves = write(tmp_path)
    source = read(tmp_path)
    for part, half in zip((source.train, source.queries), halves, strict=True):
        assert list(part.ids) == [name for name, _ in half]
        assert part.labels.tolist() == [product for _, product in half]
        assert part.labels.dtype == np.int64
        assert part.images == [folder / name for name in part.ids]
        assert [read_image(path, 1).shape for path in part.images[:2]] == [(6, 8), (6, 9)]
    assert source.gallery == "queries"
    assert len(divide(source, validation=1).gallery) == 4  # two of each product


def test_the_index_is_read_without_images(tmp_path):
    folder, halves = write(tmp_path)
    for path in (folder / "bicycle_final").iterdir():
        path.unlink()
    train, test = read_index(folder)
    assert [train.names, test.names] == [[name for name, _ in half] for half in halves]
    with pytest.raises(DataUnavailable, match=r"20 of 20 images listed in Ebay_train\.txt and Eb"):
        read(tmp_path)


def test_missing_lists_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"Ebay_train\.txt, Ebay_test\.txt; get Stanford_O"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("Ebay_train.txt", HEADER + "\n", "", r"Ebay_train\.txt, line 1: '1 1 1 bicycle"),
        ("Ebay_train.txt", "\n2 1 1 ", "\n2 1 ", r"Ebay_train\.txt, line 3: .* has 3 fields"),
        ("Ebay_train.txt", "\n2 1 1 ", "\n2 one 1 ", "line 3: 'one' is not a whole number"),
        ("Ebay_train.txt", "2872_1", "2872_0", "lists bicycle_final/111085122872_0.JPG twice"),
        ("Ebay_test.txt", "134190_0", "122872_0", "lists bicycle_final/111085122872_0.JPG twice"),
        ("Ebay_test.txt", " 11320 ", " 3 ", "1 products, for instance 3, are in both"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, file, old, new, said):
    edit(write(tmp_path)[0] / file, old, new)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


@pytest.mark.parametrize(("text", "said"), [("", "is empty"), (HEADER, "lists nothing")])
def test_empty_lists_are_refused(tmp_path, text, said):
    (write(tmp_path)[0] / "Ebay_test.txt").write_text(text)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)
