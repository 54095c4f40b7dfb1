"""Sets that are composed or drawn: two-digit numbers, N-digit MNIST, Omniglot, black squares."""

import io
import zipfile
from functools import cache

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binomtest, chisquare
from sklearn.datasets import load_digits

from rcir.data import DataConfig, load_splits
from rcir.data.augmentation import occlude
from rcir.data.datasets.handwriting import list_released_classes
from rcir.errors import InvalidConfig, InvalidData
from tests.data.small_sets import read

PARTS = ("train", "validation", "gallery", "tuning", "calibration", "test")
QUERIES = PARTS[3:]


def unseen(n):
    """The numbers of the evaluation in the lists of Oh et al. (2019), drawn with seed 714."""
    chosen = np.random.RandomState(714).choice(n, 7 * n // 10, replace=False).tolist()
    return set(range(n)) - set(chosen)


# Black squares over tiles

WHITE = np.full((4000, 8, 16), 200, np.uint8)


def squares(image):
    """(row, column, side) of the black square in each 8 x 8 tile; side 0 if there is none."""
    results = []
    for left in (0, 8):
        black = image[:, left : left + 8] == 0
        side = round(np.sqrt(black.sum()))
        assert black.sum() == side**2
        rows, columns = np.flatnonzero(black.any(1)), np.flatnonzero(black.any(0))
        if side:
            assert black[rows[0] : rows[0] + side, columns[0] : columns[0] + side].all()
        results.append((rows[0], columns[0], side) if side else (0, 0, 0))
    return results


@pytest.fixture(scope="module")
def occlusion():
    hidden, occluded = occlude(WHITE, 1.0, np.random.default_rng(0))
    return hidden, occluded, np.array([squares(image) for image in hidden])


def test_one_black_square_per_tile_is_drawn_and_flagged(occlusion):
    hidden, occluded, _ = occlusion  # `squares` checks the shape
    assert set(np.unique(hidden)) == {0, 200}
    assert (WHITE == 200).all()  # not written to
    np.testing.assert_array_equal(occluded, (hidden == 0).any(axis=(1, 2)))


def test_sides_and_places_of_squares_are_uniform(occlusion):
    drawn = occlusion[2]
    assert chisquare(np.bincount(drawn[:, :, 2].ravel(), minlength=9)).pvalue > 1e-3
    for side in (1, 4, 7):
        for axis in (0, 1):
            places = np.bincount(drawn[drawn[:, :, 2] == side][:, axis], minlength=9 - side)
            assert len(places) == 9 - side
            assert chisquare(places).pvalue > 1e-3


def test_tiles_are_hit_independently():
    hidden, _ = occlude(WHITE, 0.5, np.random.default_rng(1))
    hit = (hidden.reshape(-1, 8, 2, 8) == 0).any(axis=(1, 3))
    share = 0.5 * 8 / 9
    for pattern, expected in (((0, 0), (1 - share) ** 2), ((1, 1), share**2)):
        assert binomtest(int((hit == pattern).all(1).sum()), 4000, expected).pvalue > 1e-3


# Two-digit numbers of scikit-learn's digits


@pytest.fixture(scope="module")
def handwritten():
    """The rows and the classes of every handwritten digit, by its pixels."""
    bunch = load_digits()
    rows, classes = {}, {}
    for row, (picture, target) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        pixels = np.round(picture * 255 / 16).astype(np.uint8).tobytes()
        rows.setdefault(pixels, set()).add(row)
        classes.setdefault(pixels, set()).add(int(target))
    return rows, classes


def halves(images):
    """The left and right digits of (n, 8, 16) images, as bytes."""
    return [(image[:, :8].tobytes(), image[:, 8:].tobytes()) for image in images]


def test_parts_have_the_requested_sizes_and_the_released_classes(splits):
    released = list_released_classes(2)
    all_classes = (released[:60], released[60:], *[unseen(100)] * 4)
    closed = load_splits(DataConfig("digits", options={"open_set": False}))
    for part, n, classes in zip(PARTS, (400, 100, 300, 200, 400, 100), all_classes, strict=True):
        images = getattr(splits, part)
        assert (images.images.shape, images.images.dtype) == ((n, 8, 16), np.uint8)
        assert len(set(images.ids)) == n
        labels, counts = np.unique(images.labels, return_counts=True)
        assert set(labels) == set(classes)
        assert counts.max() - counts.min() <= 1
        assert set(getattr(closed, part).labels) == set(range(100))


def test_images_show_handwritten_digits_of_their_label(splits, handwritten):
    _, classes = handwritten
    assert not splits.gallery.attributes["occluded"].any()
    for part in PARTS:
        images = getattr(splits, part)
        whole = ~images.attributes["occluded"]
        assert whole.any()
        pairs = halves(images.images[whole])
        for (left, right), label in zip(pairs, images.labels[whole], strict=True):
            assert label // 10 in classes[left]
            assert label % 10 in classes[right]


def test_no_handwritten_digit_is_in_two_pools(splits, handwritten):
    rows, _ = handwritten
    pools = []
    for pool in (*PARTS[:3], QUERIES):
        parts = (pool,) if isinstance(pool, str) else pool
        images = np.concatenate([getattr(splits, part).images for part in parts])
        pixels = {tile for pair in halves(images) for tile in pair}
        # Occluded digits, and those that the data set has twice, prove nothing.
        pools.append({tile for tile in pixels if len(rows.get(tile, ())) == 1})
    assert all(len(pool) > 40 for pool in pools)
    assert sum(map(len, pools)) == len(set.union(*pools))


@pytest.mark.parametrize("occlusion", [0.0, 1.0])
def test_no_query_comes_twice_or_is_in_another_part(occlusion):
    options = {"occlusion": occlusion, "train_occlusion": occlusion} | dict.fromkeys(PARTS, 1500)
    parts = load_splits(DataConfig("digits", seed=1, options=options))
    others, queries = (
        [image.tobytes() for part in names for image in getattr(parts, part).images]
        for names in (PARTS[:3], QUERIES)
    )
    assert len(queries) == len({*queries}) == 4_500
    assert {*queries}.isdisjoint(others)


def test_queries_of_digits_can_show_new_numbers():
    sizes = dict(zip(PARTS, (60, 60, 90, 300, 600, 100), strict=True))
    plain, splits = (
        load_splits(DataConfig("digits", options=sizes | more))
        for more in ({}, {"queries": "new-labels"})
    )
    assert {name: len(part) for name, part in vars(splits).items()} == sizes
    for part in PARTS[:3]:
        np.testing.assert_array_equal(getattr(splits, part).images, getattr(plain, part).images)
    numbers = [set(getattr(splits, part).labels) for part in QUERIES]
    assert [len(each) for each in numbers] == [9, 18, 3]  # of 30
    assert set.union(*numbers) == unseen(100)
    with pytest.raises(InvalidData, match="30 labels"):
        load_splits(DataConfig("digits", options=sizes | {"test": 1, "queries": "new-labels"}))


@pytest.mark.parametrize("probability", [0.0, 0.2, 1.0])
def test_the_share_of_occluded_images_is_as_configured(probability):
    options = {"occlusion": probability, "train_occlusion": probability}
    options |= dict.fromkeys(PARTS, 1000)
    parts = load_splits(DataConfig("digits", seed=3, options=options))
    # A digit is hit with that probability, and by a square of side 0 in one of nine cases.
    expected = 1 - (1 - probability * 8 / 9) ** 2
    for part in ("train", "validation", "test"):
        occluded = getattr(parts, part).attributes["occluded"]
        assert binomtest(int(occluded.sum()), len(occluded), expected).pvalue > 1e-3
    assert not parts.gallery.attributes["occluded"].any()


def test_the_seed_decides_the_draw_of_digits():
    first, again, other = (
        load_splits(DataConfig("digits", seed=seed, options=dict.fromkeys(PARTS, 60)))
        for seed in (0, 0, 1)
    )
    for part in PARTS:
        a, b, c = (getattr(parts, part) for parts in (first, again, other))
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)
        assert a.ids == b.ids
        assert (a.images != c.images).any()


@pytest.mark.parametrize(
    ("option", "value"), [("occlusion", 1.5), ("train_occlusion", -0.1), ("gallery", 0)]
)
def test_options_of_digits_out_of_range_are_refused(option, value):
    with pytest.raises(InvalidConfig, match=option):
        load_splits(DataConfig("digits", options={option: value}))


@pytest.mark.parametrize(
    ("digits", "first"),
    # Of NumPy's legacy generator, whose stream is frozen; the lists were released with seed 714.
    [(2, [6, 37, 87, 50, 43, 74, 94, 27]), (3, [154, 240, 525, 414, 351, 657, 866, 184])],
)
def test_classes_are_those_of_the_released_lists(digits, first):
    classes = list_released_classes(digits)
    assert classes[:8] == first
    assert len(set(classes)) == len(classes) == 7 * 10**digits // 10
    assert set(range(10**digits)) - set(classes) == unseen(10**digits)


# Omniglot


def png(side=105, shade=255):
    buffer = io.BytesIO()
    Image.new("L", (side, side), shade).save(buffer, "png")
    return buffer.getvalue()


def shade_of(kind, character, drawing):
    return (50 * kind + 20 * character + drawing) % 256


@cache
def omniglot_archive(kinds=30, characters=1, drawings=20, side=105, content=None):
    """An archive laid out like the published one, as bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for kind, character, drawing in np.ndindex(kinds, characters, drawings):
            folder = f"images_background/Alphabet_{kind:02d}/character{character:02d}"
            picture = content or png(side, shade_of(kind, character, drawing))
            archive.writestr(f"{folder}/{kind:04d}_{drawing + 1:02d}.png", picture)
    return buffer.getvalue()


def write_omniglot(root, content=None, **layout):
    (root / "omniglot").mkdir(exist_ok=True)
    path = root / "omniglot" / "images_background.zip"
    path.write_bytes(omniglot_archive(**layout) if content is None else content)
    return path


def load_omniglot(root, seed=0, **options):
    """The splits of an archive with few characters in each of 30 alphabets."""
    sizes = {"train": 5, "validation": 5, "gallery": 4, "tuning": 100, "calibration": 100}
    config = DataConfig("omniglot", root=str(root), seed=seed, options=sizes | options)
    return load_splits(config)


def alphabets(part):
    return {name.split("/")[0] for name in part.ids}


def drawers(part):
    """The alphabet and the number at the end of each file name."""
    return {f"{name.split('/')[0]}/{name[-6:-4]}" for name in part.ids}


@pytest.mark.slow
@pytest.mark.data
def test_official_drawings_are_divided_by_alphabet(data_root):
    official = load_splits(DataConfig("omniglot", root=str(data_root)))
    parts = vars(official)
    ids = [name for part in parts.values() for name in part.ids]
    with zipfile.ZipFile(data_root / "omniglot" / "images_background.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".png")]
        for part in parts.values():
            for row in np.random.default_rng(0).choice(len(part), 40, replace=False):
                with archive.open(f"images_background/{part.ids[row]}") as file:
                    published = np.array(Image.open(file).convert("L"))
                # Ink is black in the archive and white here.
                np.testing.assert_array_equal(part.images[row], 255 - published)
    assert len(ids) == len(set(ids)) == 964 * 20
    assert {f"images_background/{name}" for name in ids} == set(names)
    kinds = [alphabets(part) for part in (official.train, official.validation, official.gallery)]
    assert [len(each) for each in kinds] == [12, 3, 15]
    assert len(set.union(*map(drawers, parts.values()))) == 600


def test_ids_name_alphabet_character_and_drawer(tmp_path):
    write_omniglot(tmp_path, characters=2)
    splits = load_omniglot(tmp_path)
    numbers, labels = {}, {}
    for part in vars(splits).values():
        assert part.cluster == "drawer"
        rows = zip(
            *(part.ids, part.images, part.labels.tolist()),
            *(part.attributes["alphabet"].tolist(), part.attributes["drawer"].tolist()),
            strict=True,
        )
        for name, image, label, number, drawer in rows:
            alphabet, character, file = name.split("/")
            place = int(alphabet[-2:]), int(character[-2:]), int(file[-6:-4]) - 1
            assert (image == 255 - shade_of(*place)).all()
            assert labels.setdefault(label, place[:2]) == place[:2]
            assert numbers.setdefault(number, alphabet) == alphabet
            assert drawer == f"{alphabet}/{file[-6:-4]}"
    assert (len(set(labels.values())), len(set(numbers.values()))) == (60, 30)


def test_queries_are_other_drawings_of_the_gallery_s_characters(tmp_path):
    write_omniglot(tmp_path)
    splits = load_omniglot(tmp_path, tuning=160, calibration=159)
    # 20 alphabets of one character, 16 of whose drawings are queries.
    assert {name: len(part) for name, part in vars(splits).items()} == {
        **{"train": 100, "validation": 100, "gallery": 80},
        **{"tuning": 160, "calibration": 159, "test": 1},
    }
    labels, counts = np.unique(splits.gallery.labels, return_counts=True)
    assert set(counts.tolist()) == {4}
    for name in QUERIES:
        assert set(getattr(splits, name).labels) <= set(labels)
    kinds = [alphabets(part) for part in (splits.train, splits.validation, splits.gallery)]
    assert [len(each) for each in kinds] == [5, 5, 20]
    assert len(set.union(*kinds)) == 30


def test_the_published_set_is_read_in_halves_of_alphabets(tmp_path):
    write_omniglot(tmp_path)
    source = read("omniglot", tmp_path)
    kinds = alphabets(source.train), alphabets(source.queries)
    assert (len(kinds[0]), len(kinds[1]), kinds[0] & kinds[1]) == (15, 15, set())
    assert len({*source.train.ids, *source.queries.ids}) == 600
    assert source.gallery == "queries"


def ids_of(splits, names):
    return [getattr(splits, name).ids for name in names]


def test_clusters_or_labels_of_omniglot_stay_together(tmp_path):
    write_omniglot(tmp_path, characters=3)
    plain = load_omniglot(tmp_path)
    other = load_omniglot(tmp_path, seed=1)
    assert not any(a == b for a, b in zip(ids_of(plain, PARTS), ids_of(other, PARTS), strict=True))
    for options, group, sizes in (
        ({"cluster": "alphabet"}, alphabets, [3, 3, 14]),  # 100 queries, 48 of an alphabet
        ({"queries": "new-labels"}, lambda part: set(part.labels), [7, 7, 46]),  # 16 of each
        ({"cluster": "drawer"}, drawers, [34, 34, 320 - 68]),  # 3 by each
    ):
        splits = load_omniglot(tmp_path, **options)
        groups = [group(getattr(splits, name)) for name in QUERIES]
        assert [len(each) for each in groups] == sizes
        assert len(set.union(*groups)) == sum(sizes)
        same = PARTS[: 2 if "drawer" in options.values() else 3]
        assert ids_of(splits, same) == ids_of(plain, same)
    assert drawers(splits.gallery).isdisjoint(set.union(*groups))
    with pytest.raises(InvalidConfig, match="drawer"):
        load_omniglot(tmp_path, queries="new-labels", cluster="drawer")


def change_byte(content, place, mask):
    content = bytearray(content)
    content[place] ^= mask
    return bytes(content)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda whole: whole[: len(whole) // 2], "damaged"),
        (lambda whole: change_byte(whole, whole.index(b"IDAT") + 6, 1), "damaged"),
        (lambda _: b"", "damaged"),
        # Entries of the directory with an unknown encryption and compression.
        (lambda whole: change_byte(whole, whole.index(b"PK\x01\x02") + 8, 0x21), "damaged"),
        (lambda whole: change_byte(whole, whole.index(b"PK\x01\x02") + 10, 0x21), "damaged"),
        (lambda _: omniglot_archive(content=b"not a picture"), "damaged"),
        (lambda whole: whole.replace(b"0003_08", b"0003_28"), "same 20 drawers"),
        (lambda _: omniglot_archive(kinds=29), "29 alphabets"),
        (lambda _: omniglot_archive(drawings=19), "570 drawings"),
        (lambda _: omniglot_archive(side=28), r"\(28, 28\)"),
    ],
    ids=(
        *("half", "pixels", "empty", "encryption", "compression", "no pictures"),
        *("drawers", "alphabets", "drawings", "sizes"),
    ),
)
def test_a_damaged_archive_or_one_of_another_set_is_refused(tmp_path, make, word):
    write_omniglot(tmp_path, make(omniglot_archive()))
    with pytest.raises(InvalidData, match=word):
        load_omniglot(tmp_path)


def test_sizes_of_omniglot_that_do_not_fit_are_refused(tmp_path):
    write_omniglot(tmp_path)
    for options in (
        *({"train": 0}, {"validation": 0}, {"train": 20, "validation": 10}, {"gallery": 0}),
        *({"tuning": 0}, {"calibration": -1}, {"tuning": 160, "calibration": 160}),
    ):
        with pytest.raises(InvalidData, match="at least 1"):
            load_omniglot(tmp_path, **options)
