import numpy as np
import pandas as pd
import pytest

from rcir.data import ImageSet
from rcir.data.datasets.msls import read
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

CITIES = ("amman", "cph", "sf", "zurich")
SIDES = ("database", "query")


def write(root, cities=CITIES, n=12, panoramas=2):
    """Tables and empty files laid out like the official ones; the tables by city and side."""
    rng = np.random.default_rng(0)
    tables = {}
    for city in cities:
        for side in SIDES:
            folder = root / "msls" / "train_val" / city / side
            (folder / "images").mkdir(parents=True)
            # Official keys start with anything, and one could be taken for a missing value.
            keys = [f"{k}-{city}_{side}" for k in range(n - 1)] + [f"NA{side}"[:2] if n else ""]
            table = pd.DataFrame(
                {
                    "key": keys,
                    # All cities on the same 60 m: only their numbers tell them apart.
                    "easting": 500_000 + rng.uniform(0, 60, n),
                    "northing": 4_000_000 + rng.uniform(0, 60, n),
                    "pano": np.arange(n) < panoramas,
                }
            )
            tables[city, side] = table
            save(folder, table, rng)
            for key in table.key[~table.pano]:
                (folder / "images" / f"{key}.jpg").touch()
    return tables


def sequences(table):
    """Of five images each; a key may look like a number."""
    return [f"00{row // 5}" for row in range(len(table))]


def save(folder, table, rng):
    n = len(table)
    unused = {"unique_cluster": 1, "control_panel": False, "night": False}
    positions = table[["key", "easting", "northing"]].assign(**unused, view_direction="Forward")
    positions.to_csv(folder / "postprocessed.csv")
    raw = table[["key"]].assign(lon=12.5, lat=55.7, ca=rng.uniform(0, 360, n), captured_at="2019")
    frames = table[["key"]].assign(sequence_key=sequences(table), frame_number=range(n))
    frames.to_csv(folder / "seq_info.csv")
    # Another order than in the other table.
    raw.assign(pano=table.pano).sample(frac=1, random_state=0).to_csv(folder / "raw.csv")


def expected(tables, *parts):
    """Ids, places and cities of the images that are no panoramas."""
    ids, places, cities = [], [], []
    for city, side in parts:
        for row in tables[city, side].itertuples():
            if not row.pano:
                ids.append(f"{city}/{side}/images/{row.key}.jpg")
                places.append((row.easting, row.northing))
                cities.append(city)
    return ids, np.array(places), cities


def test_cph_and_sf_evaluate_and_the_others_train(tmp_path):
    tables = write(tmp_path)
    source = read(tmp_path)
    assert isinstance(source.gallery, ImageSet)
    trains = [(city, side) for city in ("amman", "zurich") for side in SIDES]
    for part, sides in (
        (source.train, trains),
        (source.queries, [("cph", "query"), ("sf", "query")]),
        (source.gallery, [("cph", "database"), ("sf", "database")]),
    ):
        ids, places, cities = expected(tables, *sides)
        assert part.ids == ids
        assert part.attributes["city"].tolist() == cities
        assert part.attributes["sequence"].tolist() == [
            sequence
            for each in sides
            for sequence, pano in zip(sequences(tables[each]), tables[each].pano, strict=True)
            if not pano
        ]
        assert part.cluster == "sequence"
        assert part.images == [tmp_path / "msls" / "train_val" / name for name in ids]
        assert all(path.is_file() for path in part.images)
        np.testing.assert_allclose(part.relevance.places[:, :2], places, rtol=0, atol=1e-6)
        assert part.labels is None
    assert source.notes == ("16 panoramas were left out",)
    # As the folders of the images are called.
    assert source.train.relevance.database.tolist() == [
        name.split("/")[1] == "database" for name in source.train.ids
    ]
    assert (source.train.relevance.near, source.train.relevance.radius) == (10, 25)


def test_images_match_within_25_metres_of_the_same_city(tmp_path):
    tables = write(tmp_path)
    source = read(tmp_path)
    _, asked, cities = expected(tables, ("cph", "query"), ("sf", "query"))
    _, searched, others = expected(tables, ("cph", "database"), ("sf", "database"))
    near = np.hypot(*(asked[:, None] - searched).transpose(2, 0, 1)) <= 25
    same = np.array(cities)[:, None] == np.array(others)
    assert (near & ~same).any()
    positions = np.tile(np.arange(len(searched)), (len(asked), 1))
    found = source.queries.relevance.of(source.gallery.relevance, positions)
    np.testing.assert_array_equal(found, near & same)
    totals = source.queries.relevance.totals(source.gallery.relevance)
    np.testing.assert_array_equal(totals, (near & same).sum(1))


@pytest.mark.parametrize("cities", [["zurich"], "zurich", ("zurich", "amman")], ids=str)
def test_training_cities_can_be_chosen(tmp_path, cities):
    write(tmp_path)
    source = read(tmp_path, cities=cities)
    chosen = {cities} if isinstance(cities, str) else set(cities)
    assert set(source.train.attributes["city"].tolist()) == chosen
    # The numbers of the cities, and so the places of the others, do not depend on it.
    np.testing.assert_array_equal(
        source.queries.relevance.places, read(tmp_path).queries.relevance.places
    )


@pytest.mark.parametrize("cities", [["oslo"], ["sf"], ["zurich", "zurich"], []], ids=str)
def test_cities_that_cannot_train_are_refused(tmp_path, cities):
    write(tmp_path)
    with pytest.raises(InvalidConfig, match=r"cities that can train, once each: amman, zurich"):
        read(tmp_path, cities=cities)


def test_without_training_cities_nothing_trains(tmp_path):
    write(tmp_path, cities=("cph", "sf"))
    with pytest.raises(InvalidConfig, match=r"none is there"):
        read(tmp_path)


def test_without_panoramas_there_is_no_note(tmp_path):
    write(tmp_path, panoramas=0)
    assert read(tmp_path).notes == ()


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(DataUnavailable, match=r"cph, sf not in .*msls/train_val: unpack"):
        read(tmp_path)
    write(tmp_path)
    place = tmp_path / "msls" / "train_val" / "sf" / "query"
    for key in ("4-sf_query", "7-sf_query"):
        (place / "images" / f"{key}.jpg").unlink()
    with pytest.raises(DataUnavailable, match=r"2 of 10 images .* missing .* 4-sf_query"):
        read(tmp_path)
    for path in (place / "images").iterdir():
        path.unlink()
    (place / "images").rmdir()
    with pytest.raises(DataUnavailable, match=r"10 of 10 images .*sf/query/images"):
        read(tmp_path)
    (place / "raw.csv").unlink()
    with pytest.raises(DataUnavailable, match=r"sf/query/raw\.csv is not there"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("postprocessed.csv", lambda table: table.drop(columns="easting"), "cannot be read"),
        ("raw.csv", lambda table: table.drop(columns="pano"), "cannot be read"),
        ("raw.csv", lambda table: table[table.key != "5-cph_query"], "1 images, .* 5-cph_query"),
        ("raw.csv", lambda table: table.assign(pano="maybe"), "12 images, .* 0-cph_query"),
        ("seq_info.csv", lambda table: table[table.key != "5-cph_query"], "no sequence in seq_inf"),
        ("seq_info.csv", lambda table: table.drop(columns="sequence_key"), "cannot be read"),
        ("raw.csv", lambda table: pd.concat([table, table]), "has the key .* twice"),
        ("postprocessed.csv", lambda table: table.assign(easting=""), "12 images"),
        ("postprocessed.csv", lambda table: table.assign(northing=np.inf), "12 images"),
        (
            "postprocessed.csv",
            lambda table: table.assign(easting=["3"] * 4 + ["x"] + ["3"] * 7),
            "1 images, the first is 4-cph_query",
        ),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, name, harm, said):
    write(tmp_path)
    path = tmp_path / "msls" / "train_val" / "cph" / "query" / name
    harm(pd.read_csv(path, index_col=0, keep_default_na=False)).to_csv(path)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'key,pano\n"a'], ids=repr)
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    write(tmp_path)
    path = tmp_path / "msls" / "train_val" / "sf" / "database" / "raw.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"raw\.csv cannot be read"):
        read(tmp_path)
