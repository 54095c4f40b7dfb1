import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from rcir.data import DataConfig, load_splits, with_cluster
from rcir.data.datasets import omniglot
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

QUERIES = ("tuning", "calibration", "test")


@pytest.fixture(scope="module")
def drawings(data_root):
    return load_splits(DataConfig("omniglot", root=str(data_root)))


@pytest.fixture(scope="module")
def archive(data_root):
    """The published archive, opened without our reader."""
    with zipfile.ZipFile(data_root / "omniglot" / "images_background.zip") as opened:
        yield opened


def alphabets(part):
    return {name.split("/")[0] for name in part.ids}


def png(side=105, shade=255):
    buffer = io.BytesIO()
    Image.new("L", (side, side), shade).save(buffer, "png")
    return buffer.getvalue()


def write(root, kinds=30, characters=1, drawings=20, content=None):
    """An archive laid out like the published one."""
    (root / "omniglot").mkdir(exist_ok=True)
    path = root / "omniglot" / "images_background.zip"
    content = png() if content is None else content
    with zipfile.ZipFile(path, "w") as opened:
        for kind in range(kinds):
            for character in range(characters):
                folder = f"images_background/Alphabet_{kind:02d}/character{character:02d}"
                for drawing in range(drawings):
                    opened.writestr(f"{folder}/{kind:04d}_{drawing:02d}.png", content)
    return path


def load(root, seed=0, **options):
    """The splits of an archive with one character in each of 30 alphabets."""
    sizes = {"train": 5, "validation": 5, "gallery": 4, "tuning": 100, "calibration": 100}
    config = DataConfig("omniglot", root=str(root), seed=seed, options=sizes | options)
    return load_splits(config)


@pytest.mark.data
def test_the_parts_divide_the_official_drawings(drawings, archive):
    parts = vars(drawings)
    ids = [name for part in parts.values() for name in part.ids]
    official = {
        name.removeprefix("images_background/")
        for name in archive.namelist()
        if name.endswith(".png")
    }
    assert len(ids) == len(set(ids)) == 964 * 20
    assert set(ids) == official
    assert len({name.rpartition("/")[0] for name in ids}) == 964
    assert len(set.union(*map(alphabets, parts.values()))) == 30
    labels = np.concatenate([part.labels for part in parts.values()])
    assert np.unique(labels, return_counts=True)[1].tolist() == [20] * 964
    assert (len(drawings.tuning), len(drawings.calibration)) == (2500, 2500)


@pytest.mark.data
def test_every_alphabet_is_in_one_part_alone(drawings):
    kinds = [alphabets(part) for part in (drawings.train, drawings.validation, drawings.gallery)]
    assert [len(each) for each in kinds] == [12, 3, 15]
    assert len(set.union(*kinds)) == 30
    for name in QUERIES:
        assert alphabets(getattr(drawings, name)) <= kinds[2]


@pytest.mark.data
def test_queries_are_other_drawings_of_the_gallerys_characters(drawings):
    labels, counts = np.unique(drawings.gallery.labels, return_counts=True)
    assert set(counts.tolist()) == {4}
    seen = set(drawings.gallery.ids)
    for name in QUERIES:
        part = getattr(drawings, name)
        assert set(part.labels.tolist()) <= set(labels.tolist())
        assert seen.isdisjoint(part.ids)
        seen |= set(part.ids)
    assert len(seen) == 20 * len(labels)


@pytest.mark.data
def test_ids_name_drawing_character_and_alphabet(drawings, archive):
    rng = np.random.default_rng(0)
    names, numbers = {}, {}
    for part in vars(drawings).values():
        for row in rng.choice(len(part), 40, replace=False):
            name = part.ids[row]
            with archive.open(f"images_background/{name}") as file, Image.open(file) as image:
                published = np.array(image.convert("L"))
            # Ink is black in the archive and white here.
            np.testing.assert_array_equal(part.images[row], 255 - published)
            assert set(np.unique(published).tolist()) == {0, 255}
        for name, label, number in zip(
            part.ids, part.labels.tolist(), part.attributes["alphabet"].tolist(), strict=True
        ):
            alphabet, character, _ = name.split("/")
            assert names.setdefault(label, (alphabet, character)) == (alphabet, character)
            assert numbers.setdefault(number, alphabet) == alphabet
    assert len(set(names.values())) == 964
    assert len(set(numbers.values())) == 30


@pytest.mark.data
def test_the_seed_decides_which_alphabets_train(drawings, data_root):
    other = load_splits(DataConfig("omniglot", root=str(data_root), seed=1))
    assert alphabets(other.train) != alphabets(drawings.train)
    assert len(alphabets(other.train)) == 12


def test_the_seed_decides_who_is_where(tmp_path):
    write(tmp_path)
    first, again, other = (load(tmp_path, seed=seed) for seed in (0, 0, 1))
    for name, part in vars(first).items():
        assert list(getattr(again, name).ids) == list(part.ids)
        assert list(getattr(other, name).ids) != list(part.ids)


@pytest.mark.data
def test_the_whole_set_is_read_in_halves_of_alphabets(data_root):
    source = omniglot.read(data_root)
    kinds = alphabets(source.train), alphabets(source.queries)
    assert (len(kinds[0]), len(kinds[1]), kinds[0] & kinds[1]) == (15, 15, set())
    assert len({*source.train.ids, *source.queries.ids}) == 964 * 20
    assert source.gallery == "queries"


def drawers(part):
    """Alphabet and the number that ends a file's name, by hand."""
    return {f"{name.split('/')[0]}/{name[-6:-4]}" for name in part.ids}


@pytest.mark.data
def test_drawers_are_the_numbers_in_the_names_within_an_alphabet(drawings):
    for part in vars(drawings).values():
        assert part.cluster == "drawer"
        expected = [f"{name.split('/')[0]}/{name[-6:-4]}" for name in part.ids]
        assert part.attributes["drawer"].tolist() == expected
    assert len(set.union(*map(drawers, vars(drawings).values()))) == 600


@pytest.mark.data
def test_drawings_of_one_drawer_are_alike(drawings):
    """The ink of a drawing, beside that of others of its character, tells who drew it."""
    order = np.argsort(drawings.train.ids)
    ink = (drawings.train.images[order] > 0).mean((1, 2)).reshape(-1, 20)
    ink -= ink.mean(axis=1, keepdims=True)
    alphabet = drawings.train.attributes["alphabet"][order].reshape(-1, 20)[:, 0]

    def alike(ink):
        """Mean intraclass correlation of a drawer's drawings."""
        found = []
        for name in np.unique(alphabet):
            own = ink[alphabet == name]
            between, within = len(own) * own.mean(0).var(ddof=1), own.var(0, ddof=1).mean()
            found.append((between - within) / (between + (len(own) - 1) * within))
        return np.mean(found)

    assert alike(ink) > 0.3
    assert abs(alike(np.random.default_rng(0).permuted(ink, axis=1))) < 0.02


@pytest.mark.data
def test_drawers_that_search_calibrate_and_test_are_others(drawings, data_root):
    splits = load_splits(with_cluster(DataConfig("omniglot", root=str(data_root)), "drawer"))
    for name in ("train", "validation"):
        assert getattr(splits, name).ids == getattr(drawings, name).ids
        np.testing.assert_array_equal(getattr(splits, name).images, getattr(drawings, name).images)
    evaluated = [
        sorted(name for each in ("gallery", *QUERIES) for name in getattr(part, each).ids)
        for part in (drawings, splits)
    ]
    assert evaluated[0] == evaluated[1]
    drawn = [drawers(getattr(splits, name)) for name in ("gallery", *QUERIES)]
    assert len(set.union(*drawn)) == sum(map(len, drawn)) == 300
    # About 2,500 queries by as many drawers; four drawers of each alphabet are searched.
    assert len(drawn[0]) == 60
    assert len(drawn[1]) == len(drawn[2])
    assert 2200 < len(splits.calibration) < 2800
    assert set(np.unique(splits.gallery.labels, return_counts=True)[1].tolist()) == {4}


@pytest.mark.data
def test_new_drawers_are_not_new_without_a_cluster(drawings):
    assert len(drawers(drawings.calibration) & drawers(drawings.test)) > 290


def test_drawers_keep_together_in_a_small_archive(tmp_path):
    write(tmp_path, characters=3)
    plain, splits = load(tmp_path), load(tmp_path, cluster="drawer")
    for name in ("train", "validation"):
        assert getattr(splits, name).ids == getattr(plain, name).ids
    drawn = [drawers(getattr(splits, name)) for name in ("gallery", *QUERIES)]
    assert [len(each) for each in drawn] == [80, 34, 34, 320 - 68]  # 100 queries by 3 a drawer
    assert len(set.union(*drawn)) == 400
    assert len(splits.calibration) == 34 * 3


def test_alphabets_keep_together_and_the_gallery_stays_the_same(tmp_path):
    write(tmp_path, characters=2)
    plain, splits = load(tmp_path), load(tmp_path, cluster="alphabet")
    for name in ("train", "validation", "gallery"):
        assert getattr(splits, name).ids == getattr(plain, name).ids
    drawn = [alphabets(getattr(splits, name)) for name in QUERIES]
    assert [len(each) for each in drawn] == [4, 4, 12]  # 100 queries, 32 of an alphabet
    assert len(set.union(*drawn)) == 20


def test_a_cluster_that_is_not_known_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(InvalidConfig, match=r"cluster is 'person', .*; they have alphabet, drawer"):
        load(tmp_path, cluster="person")


def test_an_archive_of_other_drawers_is_refused(tmp_path):
    path = write(tmp_path)
    with zipfile.ZipFile(path) as opened:
        content = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(path, "w") as opened:
        for name, picture in content.items():
            opened.writestr(name.replace("0003_07", "0003_27"), picture)
    with pytest.raises(InvalidData, match="by the same 20 drawers, 00 to 19: fetch it again"):
        load(tmp_path)


def test_a_missing_archive_says_where_it_belongs(tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    for config in (
        DataConfig("omniglot"),
        DataConfig("omniglot", root=str(tmp_path / "no" / "where")),
        DataConfig("omniglot", download=True),
    ):
        with pytest.raises(
            DataUnavailable, match=r"images_background\.zip is not there.* RCIR_DATA"
        ):
            load_splits(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut short", "changed", "text", "empty", "no pictures inside"])
def test_a_damaged_archive_is_refused(tmp_path, harm):
    path = write(tmp_path, content=b"not a picture" if harm == "no pictures inside" else None)
    content = bytearray(path.read_bytes())
    if harm == "changed":
        content[content.index(b"IDAT") + 6] ^= 1
    elif harm == "cut short":
        content = content[: len(content) // 2]
    elif harm in ("text", "empty"):
        content = b"hello" if harm == "text" else b""
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"images_background\.zip is damaged.*fetch it again"):
        load(tmp_path)


@pytest.mark.parametrize("offset", [8, 10])  # in an entry of the directory: flags, compression
def test_an_archive_of_unknown_or_secret_members_is_refused(tmp_path, offset):
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + offset] ^= 0x21
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"images_background\.zip"):
        load(tmp_path)


def test_an_archive_of_misplaced_pictures_is_refused(tmp_path):
    path = write(tmp_path)
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("a.png", png())
        opened.writestr("x/b.png", png())
    with pytest.raises(InvalidData, match="0 drawings of 0 characters in 0 alphabets"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"kinds": 29}, "580 drawings of 29 characters in 29 alphabets"),
        ({"kinds": 31}, "620 drawings of 31 characters in 31 alphabets"),
        ({"drawings": 19}, "570 drawings of 30 characters in 30 alphabets"),
        ({"content": png(side=28)}, r"600 drawings of .*, of sizes \[\(28, 28\)\]"),
    ],
    ids=["too few alphabets", "too many", "too few drawings", "too small"],
)
def test_an_archive_of_something_else_is_refused(tmp_path, layout, said):
    write(tmp_path, **layout)
    with pytest.raises(InvalidData, match=f"{said}.*; Omniglot's background set has 20 of each"):
        load(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"train": 0},
        {"validation": 0},
        {"train": 20, "validation": 10},
        {"gallery": 0},
        {"gallery": 21},
        {"gallery": 20},
        {"tuning": 0},
        {"calibration": -1},
        {"tuning": 160, "calibration": 160},
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, options):
    write(tmp_path)
    with pytest.raises(InvalidData, match="at least 1, and some"):
        load(tmp_path, **options)


def test_sizes_that_just_fit_leave_one_query_to_test_on(tmp_path):
    write(tmp_path)
    splits = load(tmp_path, tuning=160, calibration=159)
    # 20 alphabets of one character, 16 of their drawings are queries.
    assert len(splits.test) == 20 * 16 - 160 - 159 == 1
    assert {name: len(part) for name, part in vars(splits).items()} == {
        **{"train": 100, "validation": 100, "gallery": 80},
        **{"tuning": 160, "calibration": 159, "test": 1},
    }
    assert not splits.train.images.any()  # white paper


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"data\.options of omniglot"):
        load(tmp_path, galery=3)
