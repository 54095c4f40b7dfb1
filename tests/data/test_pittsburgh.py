import numpy as np
import pytest
from scipy.io import savemat

from rcir.data import ImageSet
from rcir.data.datasets import pittsburgh
from rcir.data.datasets.pittsburgh import read, read_index
from rcir.data.division import Source, divide
from rcir.data.within_radius import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

QUERIES = ("tuning", "calibration", "test")


def places(n):
    positions = np.arange(2.0 * n).reshape(n, 2) * 1000
    names = [str(k) for k in range(n)]
    return ImageSet(names, None, names, relevance=WithinRadius(positions, 25.0))


@pytest.fixture(scope="module")
def folder(data_root):
    return data_root / "annotations" / "pitts30k"


@pytest.fixture(scope="module")
def published(folder):
    """The published names and positions, read without our reader."""
    names = {
        part: (folder / f"pitts30k_imageNames_{part}.txt").read_text().splitlines()
        for part in ("index", "query")
    }
    with np.load(folder / "pitts30k_test.npz") as arrays:
        return names, arrays["utmDb"], arrays["utmQ"]


def cells(names):
    """A MATLAB cell array, n x 1."""
    array = np.empty((len(names), 1), object)
    array[:, 0] = names
    return array


def write(path, database, places, queries, query_places, radius=25.0, upright=True, **changes):
    """An index laid out like the official ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    struct = {
        "whichSet": "test",
        "dbImageFns": cells(database),
        "utmDb": places.T if upright else places,
        "qImageFns": cells(queries),
        "utmQ": query_places.T if upright else query_places,
        "numImages": len(database),
        "numQueries": len(queries),
        "posDistThr": radius,
        "posDistSqThr": radius**2,
        "nonTrivPosDistSqThr": 100,
    } | changes
    struct = {name: value for name, value in struct.items() if value is not None}
    savemat(path, {"dbStruct": struct}, do_compression=True)
    return path


def small(root, sizes=((5, 3), (4, 3), (6, 4)), version="30k", **changes):
    """All three splits, with empty files for the images: nothing is decoded."""
    rng = np.random.default_rng(0)
    written, start = {}, 0
    for split, (n, asked) in zip(("train", "val", "test"), sizes, strict=True):
        names = [f"{k % 3:03d}/{start + k:06d}_pitch1_yaw1.jpg" for k in range(n)]
        queries = [f"{k % 2:03d}/{start + k:06d}_pitch2_yaw1.jpg" for k in range(asked)]
        start += n
        places, query_places = rng.uniform(0, 60, (n, 2)), rng.uniform(0, 60, (asked, 2))
        path = root / "pittsburgh" / "datasets" / f"pitts{version}_{split}.mat"
        write(path, names, places, queries, query_places, **changes)
        written[split] = names, places, queries, query_places
        for name in [*names, *(f"queries_real/{name}" for name in queries)]:
            image = root / "pittsburgh" / name
            image.parent.mkdir(parents=True, exist_ok=True)
            image.touch()
    return written


@pytest.mark.data
def test_the_published_names_and_positions_are_read(folder, published):
    names, database, queries = published
    index = read_index(folder / "pitts30k_test.npz")
    assert (len(index.gallery), len(index.queries), index.radius) == (10_000, 6_816, 25.0)
    assert [f"./Pittsburgh250k/{name}" for name in index.gallery] == names["index"]
    assert [f"./Pittsburgh250k/{name}" for name in index.queries] == names["query"]
    np.testing.assert_array_equal(index.gallery_places, database)
    np.testing.assert_array_equal(index.query_places, queries)


@pytest.mark.data
def test_every_query_has_a_match_as_in_the_published_evaluation(folder, published):
    _, database, asked = published
    index = read_index(folder / "pitts30k_test.npz")
    queries = WithinRadius(index.query_places, index.radius)
    gallery = WithinRadius(index.gallery_places, index.radius)
    totals = queries.totals(gallery)
    assert (totals > 0).sum() == 6_816
    rows = np.random.default_rng(0).choice(6_816, 300, replace=False)
    near = np.hypot(*(asked[rows, None] - database).transpose(2, 0, 1)) <= 25
    np.testing.assert_array_equal(totals[rows], near.sum(1))
    positions = np.tile(np.arange(0, 10_000, 7), (300, 1))
    np.testing.assert_array_equal(queries.subset(rows).of(gallery, positions), near[:, ::7])


@pytest.mark.data
@pytest.mark.parametrize("upright", [True, False], ids=["2 x n", "n x 2"])
def test_the_official_form_says_the_same(folder, tmp_path, upright):
    index = read_index(folder / "pitts30k_test.npz")
    queries = [name.removeprefix("queries_real/") for name in index.queries]
    path = tmp_path / "pitts30k_test.mat"
    places = (index.gallery, index.gallery_places, queries, index.query_places)
    again = read_index(write(path, *places, index.radius, upright))
    assert (again.gallery, again.queries, again.radius) == (index.gallery, index.queries, 25.0)
    np.testing.assert_array_equal(again.gallery_places, index.gallery_places)
    np.testing.assert_array_equal(again.query_places, index.query_places)


@pytest.mark.parametrize("split", ["test", "val"])
@pytest.mark.parametrize("version", ["30k", "250k"])
def test_the_parts_are_the_published_ones(tmp_path, version, split):
    written = small(tmp_path, version=version)
    source = read(tmp_path, version=version, split=split)
    names, places, queries, query_places = written[split]
    assert isinstance(source.gallery, ImageSet)
    assert source.gallery.ids == names
    assert source.queries.ids == [f"queries_real/{name}" for name in queries]
    assert source.queries.images[0] == tmp_path / "pittsburgh" / "queries_real" / queries[0]
    assert all(path.is_file() for path in [*source.train.images, *source.gallery.images])
    near = np.hypot(*(query_places[:, None] - places).transpose(2, 0, 1)) <= 25
    assert 0 < near.sum() < near.size
    positions = np.tile(np.arange(len(names)), (len(queries), 1))
    found = source.queries.relevance.of(source.gallery.relevance, positions)
    np.testing.assert_array_equal(found, near)
    names, places, queries, query_places = written["train"]
    assert source.train.ids == names + [f"queries_real/{name}" for name in queries]
    np.testing.assert_array_equal(
        source.train.relevance.places, np.concatenate([places, query_places])
    )
    assert source.train.labels is None
    assert source.train.relevance.database.tolist() == [
        not name.startswith("queries_real") for name in source.train.ids
    ]
    assert (source.train.relevance.near, source.train.relevance.radius) == (10, 25)
    assert source.notes == ()
    for images in (source.train, source.queries, source.gallery):
        assert images.cluster == "panorama"
        panoramas = images.attributes["panorama"].tolist()
        assert all(
            name in (f"{panorama}_pitch1_yaw1.jpg", f"{panorama}_pitch2_yaw1.jpg")
            for name, panorama in zip(images.ids, panoramas, strict=True)
        )


@pytest.mark.data
def test_the_published_queries_are_cut_from_panoramas_of_24_views(folder):
    index = read_index(folder / "pitts30k_test.npz")
    images = pittsburgh._images(folder, index.queries, index.query_places, index.radius)
    names, counts = np.unique(images.attributes["panorama"], return_counts=True)
    assert (len(names), (counts == 24).sum()) == (286, 282)
    for name in names:  # taken at one place
        own = images.relevance.places[images.attributes["panorama"] == name]
        assert (own == own[0]).all()
    parts = divide(Source(places(50), images, images), cluster="panorama")
    drawn = [set(getattr(parts, part).attributes["panorama"]) for part in QUERIES]
    assert sum(map(len, drawn)) == len(set.union(*drawn)) == 286
    assert [len(each) for each in drawn] == [86, 86, 114]


def test_the_radius_and_older_names_of_fields_are_the_files(tmp_path):
    written = small(tmp_path, radius=7.0)["val"]
    path = tmp_path / "older.mat"
    places = (written[0], written[1], written[2], written[3])
    write(path, *places, dbImage=cells(written[0]), qImage=cells(written[2]), dbImageFns=None)
    assert read_index(path).gallery == written[0]
    assert read(tmp_path).train.relevance.radius == 7.0


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataUnavailable, match=r"pitts30k_train\.mat is not there: .*NetVLAD"):
        read(tmp_path)
    written = small(tmp_path)
    (tmp_path / "pittsburgh" / written["test"][0][2]).unlink()
    (tmp_path / "pittsburgh" / "queries_real" / written["train"][2][1]).unlink()
    with pytest.raises(DataUnavailable, match=r"2 of 18 images .* for instance queries_real"):
        read(tmp_path)
    (tmp_path / "pitts_test.npz").write_bytes(b"")
    with pytest.raises(DataUnavailable, match=r"pitts_imageNames_index\.txt is not there"):
        read_index(tmp_path / "pitts_test.npz")


@pytest.mark.parametrize("options", [{"version": "30"}, {"split": "train"}], ids=str)
def test_an_unknown_version_or_split_is_refused(tmp_path, options):
    with pytest.raises(InvalidConfig, match="version is '30k' or '250k', split 'test' or 'val'"):
        read(tmp_path, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"utmDb": np.zeros((2, 5))},
        {"utmDb": np.full((2, 6), np.nan)},
        {"utmQ": np.zeros((3, 4))},
        {"posDistThr": None},
        {"posDistThr": np.zeros(2)},
        {"utmQ": None},
        {"dbImageFns": cells(["000/a.jpg"] * 6)},
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, changes):
    written = small(tmp_path)["test"]
    path = write(tmp_path / "changed.mat", *written, **changes)
    with pytest.raises(InvalidData, match=r"changed\.mat.*fetch it again"):
        read_index(path)


@pytest.mark.parametrize("harm", ["cut short", "changed", "text", "empty", "no struct", "too new"])
def test_a_damaged_index_is_refused(tmp_path, harm):
    small(tmp_path)
    path = tmp_path / "pittsburgh" / "datasets" / "pitts30k_test.mat"
    if harm == "no struct":
        savemat(path, {"dbStruct": np.zeros((2, 2))})
    content = bytearray(path.read_bytes())
    if harm == "too new":  # MATLAB's 7.3 is HDF5
        content[124:126] = b"\x00\x02"
    elif harm == "changed":
        content[len(content) // 2] ^= 255
    elif harm in ("text", "empty"):
        content = bytearray(b"hello" * 200 if harm == "text" else b"")
    elif harm == "cut short":
        content = content[: len(content) // 2]
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"pitts30k_test\.mat cannot be read.*fetch it again"):
        pittsburgh.read(tmp_path)


@pytest.mark.data
def test_damaged_positions_are_refused(folder, tmp_path):
    for part in ("index", "query"):
        name = f"pitts30k_imageNames_{part}.txt"
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    content = (folder / "pitts30k_test.npz").read_bytes()
    for harmed in (content[: len(content) // 2], b"hello", b""):
        (tmp_path / "pitts30k_test.npz").write_bytes(harmed)
        with pytest.raises(InvalidData, match=r"pitts30k_test\.npz cannot be read"):
            read_index(tmp_path / "pitts30k_test.npz")
