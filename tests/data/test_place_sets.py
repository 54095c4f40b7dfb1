"""Readers of published sets of street views with positions: Pittsburgh and MSLS."""

import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat

from rcir.data.datasets.places import read_pittsburgh_index as read_index
from rcir.data.relevance import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from tests.data.small_sets import cells, read, touch


def distances(places, others):
    return np.hypot(*(np.asarray(places)[:, None] - np.asarray(others)).transpose(2, 0, 1))


def matches(source):
    """(queries, gallery) the pairs that the relevance calls a match."""
    n_queries, n_gallery = len(source.queries), len(source.gallery)
    positions = np.tile(np.arange(n_gallery), (n_queries, 1))
    return source.queries.relevance.matches(source.gallery.relevance, positions)


# Pittsburgh


def write_index(path, names, places, queries, query_places, radius=25.0, upright=True, **changes):
    """An index file laid out like the official ones; a changed field that is None is left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    struct = {
        "whichSet": "test",
        "dbImageFns": cells(names).T,
        "utmDb": places.T if upright else places,
        "qImageFns": cells(queries).T,
        "utmQ": query_places.T if upright else query_places,
        "numImages": len(names),
        "posDistThr": radius,
        "posDistSqThr": radius**2,
        "nonTrivPosDistSqThr": 100,
    } | changes
    struct = {name: value for name, value in struct.items() if value is not None}
    savemat(path, {"dbStruct": struct}, do_compression=True)
    return path


def write_pittsburgh(root, version="30k", **changes):
    """All three splits, with empty image files; returns the contents of each index."""
    rng = np.random.default_rng(0)
    contents, start = {}, 0
    for split, n, n_queries in (("train", 5, 3), ("val", 4, 3), ("test", 6, 4)):
        names = [f"{k % 3:03d}/{start + k:06d}_pitch1_yaw1.jpg" for k in range(n)]
        queries = [f"{k % 2:03d}/{start + k:06d}_pitch2_yaw1.jpg" for k in range(n_queries)]
        start += n
        contents[split] = (
            *(names, rng.uniform(0, 60, (n, 2))),
            *(queries, rng.uniform(0, 60, (n_queries, 2))),
        )
        path = root / "pittsburgh" / "datasets" / f"pitts{version}_{split}.mat"
        write_index(path, *contents[split], **changes)
        touch(root / "pittsburgh", [*names, *(f"queries_real/{name}" for name in queries)])
    return contents


@pytest.mark.data
def test_the_official_names_and_positions_match_within_25_metres(data_root, tmp_path):
    official = data_root / "annotations" / "pitts30k"
    names, queries = (
        [
            name.removeprefix("./Pittsburgh250k/")
            for name in (official / f"pitts30k_imageNames_{part}.txt").read_text().split()
        ]
        for part in ("index", "query")
    )
    with np.load(official / "pitts30k_test.npz") as arrays:
        database, query_places = arrays["utmDb"], arrays["utmQ"]
    path = write_index(tmp_path / "test.mat", names, database, queries, query_places)
    listed, radius = read_index(path)
    assert [row.file for row in listed] == names + queries
    places = np.array([row.label[1:] for row in listed])
    np.testing.assert_array_equal(places, np.concatenate([database, query_places]))
    assert (len(names), len(queries), radius) == (10_000, 6_816, 25.0)
    totals = WithinRadius(places[10_000:], radius).totals(WithinRadius(places[:10_000], radius))
    assert (totals > 0).sum() == 6_816  # every query has a match, as in the published evaluation
    rows = np.random.default_rng(0).choice(6_816, 300, replace=False)
    np.testing.assert_array_equal(
        totals[rows], (distances(query_places[rows], database) <= 25).sum(1)
    )


@pytest.mark.parametrize(
    ("version", "split", "upright"),
    [("30k", "test", True), ("30k", "val", False), ("250k", "test", False), ("250k", "val", True)],
)
def test_pittsburgh_has_the_published_parts(tmp_path, version, split, upright):
    contents = write_pittsburgh(tmp_path, version, upright=upright)
    source = read(f"pitts{version}", tmp_path, split=split)
    names, places, queries, query_places = contents[split]
    assert source.gallery.ids == names
    assert source.queries.ids == [f"queries_real/{name}" for name in queries]
    assert all(path.is_file() for path in [*source.train.images, *source.queries.images])
    near = distances(query_places, places) <= 25
    assert 0 < near.sum() < near.size
    np.testing.assert_array_equal(matches(source), near)
    names, places, queries, query_places = contents["train"]
    assert source.train.ids == names + [f"queries_real/{name}" for name in queries]
    relevance = source.train.relevance
    np.testing.assert_array_equal(relevance.places, np.concatenate([places, query_places]))
    assert relevance.database.tolist() == [True] * len(names) + [False] * len(queries)
    assert (relevance.near, relevance.radius) == (10, 25)
    for part in (source.train, source.queries, source.gallery):
        assert part.labels is None
        assert part.cluster == "panorama"
        expected = [name.partition("_pitch")[0] for name in part.ids]
        assert part.attributes["panorama"].tolist() == expected


def test_the_radius_of_evaluation_can_be_chosen(tmp_path):
    contents = write_pittsburgh(tmp_path)
    _, places, _, query_places = contents["test"]
    source = read("pitts30k", tmp_path, radius=15.0)
    near = distances(query_places, places) <= 15
    assert 0 < near.sum() < (distances(query_places, places) <= 25).sum()
    np.testing.assert_array_equal(matches(source), near)
    assert (source.train.relevance.near, source.train.relevance.radius) == (10, 25)
    with pytest.raises(InvalidConfig, match="radius"):
        read("pitts30k", tmp_path, radius=0.0)


def test_radius_and_older_field_names_of_the_index_are_read(tmp_path):
    contents = write_pittsburgh(tmp_path, radius=7.0)["val"]
    changes = {"dbImage": cells(contents[0]), "qImage": cells(contents[2]), "dbImageFns": None}
    rows, _ = read_index(write_index(tmp_path / "older.mat", *contents, **changes))
    assert [row.file for row in rows if row.split == "gallery"] == contents[0]
    assert read("pitts30k", tmp_path).train.relevance.radius == 7.0


def test_missing_parts_of_pittsburgh_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"pitts30k_train\.mat"):
        read("pitts30k", tmp_path)
    contents = write_pittsburgh(tmp_path)
    (tmp_path / "pittsburgh" / "queries_real" / contents["train"][2][1]).unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 18 .*queries_real"):
        read("pitts30k", tmp_path)


def test_an_unknown_version_or_split_is_refused(tmp_path):
    for options in ({"version": "30"}, {"split": "train"}):
        with pytest.raises(InvalidConfig, match=next(iter(options))):
            read("pitts30k", tmp_path, **options)


def test_damaged_or_inconsistent_indexes_are_refused(tmp_path):
    contents = write_pittsburgh(tmp_path)["test"]
    path = tmp_path / "pittsburgh" / "datasets" / "pitts30k_test.mat"
    whole = path.read_bytes()

    def refuse():
        with pytest.raises(InvalidData, match=path.name):
            read("pitts30k", tmp_path)

    for damaged in (
        *(b"", b"hello" * 200, whole[: len(whole) // 2]),
        whole[:-200] + bytes([whole[-200] ^ 255]) + whole[-199:],
        whole[:124] + b"\x00\x02" + whole[126:],  # the format of MATLAB 7.3
    ):
        path.write_bytes(damaged)
        refuse()
    for changes in (
        *({"utmDb": np.zeros((2, 5))}, {"utmDb": np.full((2, 6), np.nan)}),
        *({"utmQ": np.zeros((3, 4))}, {"utmQ": None}),
        *({"posDistThr": None}, {"posDistThr": np.zeros(2)}),
    ):
        write_index(path, *contents, **changes)
        refuse()
    savemat(path, {"dbStruct": np.zeros((2, 2))})
    refuse()


# MSLS

CITIES = ("amman", "cph", "sf", "zurich")
SIDES = ("database", "query")


def write_msls(root, cities=CITIES, n=12):
    """Tables and empty image files laid out like the official ones; the tables by city and side."""
    rng = np.random.default_rng(0)
    tables = {}
    for city in cities:
        for side in SIDES:
            folder = root / "msls" / "train_val" / city / side
            # A key may look like a missing value.
            keys = [f"{k}-{city}_{side}" for k in range(n - 1)] + ["NA"]
            table = pd.DataFrame(
                {
                    "key": keys,
                    # All cities cover the same 60 m: only their numbers separate them.
                    "easting": 500_000 + rng.uniform(0, 60, n),
                    "northing": 4_000_000 + rng.uniform(0, 60, n),
                    "pano": np.arange(n) < 2,
                    "sequence_key": [f"00{row // 5}" for row in range(n)],
                }
            )
            tables[city, side] = table
            touch(folder / "images", [f"{key}.jpg" for key in table.key[~table.pano]])
            positions = table[["key", "easting", "northing"]].assign(night=False)
            positions.to_csv(folder / "postprocessed.csv")
            table[["key", "sequence_key"]].to_csv(folder / "seq_info.csv")
            # In another order than the positions.
            raw = table[["key", "pano"]].assign(lon=12.5, captured_at="2019")
            raw.sample(frac=1, random_state=0).to_csv(folder / "raw.csv")
    return tables


def without_panoramas(tables, city, sides=SIDES):
    """The rows of a city that are not panoramas, with their ids."""
    frames = [
        tables[city, side].assign(
            id=f"{city}/{side}/images/" + tables[city, side].key + ".jpg", city=city
        )
        for side in sides
    ]
    table = pd.concat(frames)
    return table[~table.pano]


def test_copenhagen_and_san_francisco_evaluate_and_other_cities_train(tmp_path):
    tables = write_msls(tmp_path)
    source = read("msls", tmp_path)
    for part, cities, sides in (
        (source.train, ("amman", "zurich"), SIDES),
        (source.queries, ("cph", "sf"), ("query",)),
        (source.gallery, ("cph", "sf"), ("database",)),
    ):
        expected = pd.concat([without_panoramas(tables, city, sides) for city in cities])
        assert part.ids == expected.id.tolist()
        assert part.attributes["city"].tolist() == expected.city.tolist()
        assert part.attributes["sequence"].tolist() == expected.sequence_key.tolist()
        assert part.cluster == "sequence"
        assert part.images == [tmp_path / "msls" / "train_val" / name for name in part.ids]
        places = expected[["easting", "northing"]].to_numpy()
        np.testing.assert_allclose(part.relevance.places[:, :2], places, rtol=0, atol=1e-6)
        assert part.labels is None
    assert source.notes == ("16 panoramas were left out",)
    relevance = source.train.relevance
    assert relevance.database.tolist() == ["/database/" in name for name in source.train.ids]
    assert (relevance.near, relevance.radius) == (10, 25)
    # Street views match within 25 m in the same city.
    queries, gallery = (
        pd.concat([without_panoramas(tables, city, (side,)) for city in ("cph", "sf")])
        for side in ("query", "database")
    )
    near = distances(queries[["easting", "northing"]], gallery[["easting", "northing"]]) <= 25
    same = queries.city.to_numpy()[:, None] == gallery.city.to_numpy()
    assert (near & ~same).any()
    np.testing.assert_array_equal(matches(source), near & same)


def test_training_cities_can_be_chosen(tmp_path):
    write_msls(tmp_path)
    places = read("msls", tmp_path).queries.relevance.places
    for cities, expected in (("zurich", {"zurich"}), (("zurich", "amman"), {"amman", "zurich"})):
        source = read("msls", tmp_path, cities=cities)
        assert set(source.train.attributes["city"].tolist()) == expected
        # The places of the other cities do not depend on the choice.
        np.testing.assert_array_equal(source.queries.relevance.places, places)
    for cities in (["oslo"], ["sf"], ["zurich", "zurich"], []):
        with pytest.raises(InvalidConfig, match="amman, zurich"):
            read("msls", tmp_path, cities=cities)
    write_msls(tmp_path / "without", cities=("cph", "sf"))
    with pytest.raises(InvalidConfig, match="none"):
        read("msls", tmp_path / "without")


def test_missing_parts_of_msls_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match="cph, sf"):
        read("msls", tmp_path)
    write_msls(tmp_path)
    folder = tmp_path / "msls" / "train_val" / "sf" / "query"
    (folder / "images").rename(folder / "pictures")
    with pytest.raises(DataUnavailable, match=r"10 of 80 .*2-sf_query"):
        read("msls", tmp_path)
    (folder / "raw.csv").unlink()
    with pytest.raises(DataUnavailable, match=r"raw\.csv"):
        read("msls", tmp_path)


def test_a_damaged_table_of_msls_is_refused(tmp_path):
    write_msls(tmp_path)
    for name, harm, word in (
        ("postprocessed.csv", lambda table: table.drop(columns="easting"), "cannot be read"),
        ("raw.csv", lambda table: table[table.key != "5-cph_query"], "1 images, .*5-cph_query"),
        ("seq_info.csv", lambda table: table[table.key != "5-cph_query"], "1 images"),
        ("raw.csv", lambda table: pd.concat([table, table]), "twice"),
        ("postprocessed.csv", lambda table: table.assign(northing=np.inf), "12 images"),
    ):
        path = tmp_path / "msls" / "train_val" / "cph" / "query" / name
        whole = path.read_bytes()
        harm(pd.read_csv(path, index_col=0, keep_default_na=False)).to_csv(path)
        with pytest.raises(InvalidData, match=word):
            read("msls", tmp_path)
        path.write_bytes(whole)
