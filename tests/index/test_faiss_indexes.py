"""Approximate indexes of FAISS: recall, parameters, versions, files."""

import hashlib
import json
import subprocess
import sys
from copy import copy, deepcopy
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.index import IndexConfig, auto, build_index, find_index
from rcir.index.recall import exact_positions, recall_of
from rcir.retrieval import storage

# Of each index its options, and the recall of the 20 nearest that these have on `GALLERY`.
CASES = {
    "hnsw": ({"M": 8, "ef_search": 40}, 0.9),
    "ivf": ({"nlist": 16, "nprobe": 8}, 0.9),
    "ivf-pq": ({"nlist": 16, "nprobe": 12, "m": 8, "nbits": 6, "k_factor": 4}, 0.9),
    "factory": ({"factory": "IVF16,SQ8", "search": "nprobe=8"}, 0.85),
}
CONFIGS = [IndexConfig(kind, options) for kind, (options, _) in CASES.items()]


def drawn(n, dim=16, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


GALLERY, QUERIES = drawn(2000), drawn(50, seed=1)
NEAREST = np.argsort(np.linalg.norm(QUERIES[:, None] - GALLERY, axis=2), axis=1)[:, :20]


@pytest.fixture(params=CONFIGS, ids=CASES)
def config(request):
    return request.param


@pytest.fixture
def folder(config, tmp_path):
    place = tmp_path / "index"
    place.mkdir()
    build_index(GALLERY[:300], config).save(place)
    return place


def test_recall_and_distances_are_those_stated(config):
    distances, positions = build_index(GALLERY, config).search(QUERIES, 20)
    assert recall_of(positions, NEAREST) >= CASES[config.kind][1]
    true = np.linalg.norm(QUERIES[:, None] - GALLERY[positions], axis=2)
    slack = {"hnsw": 1e-5, "ivf": 1e-5, "ivf-pq": 2e-3, "factory": 5e-2}[config.kind]
    np.testing.assert_allclose(distances, true, atol=slack)
    assert (np.diff(distances, axis=1) >= 0).all()


def test_recall_of_found_candidates_counts_them_at_any_rank():
    assert recall_of(NEAREST[:, ::-1], NEAREST) == 1
    half = np.where(np.arange(20) < 10, NEAREST, -1)
    assert recall_of(half, NEAREST) == 0.5
    np.testing.assert_array_equal(exact_positions(GALLERY, QUERIES, 20), NEAREST)


def test_building_twice_gives_one_version(config):
    assert build_index(GALLERY, config).version == build_index(GALLERY, config).version


def test_the_version_sees_contents_and_search_parameters(config):
    index = build_index(GALLERY[:300], config)
    versions = {index.version}
    index.add(GALLERY[:0])
    index.remove(np.array([], np.int64))
    index.search(QUERIES, 3)
    assert versions == {index.version}
    index.add(GALLERY[300:301])
    versions.add(index.version)
    index.remove(np.array([7]))
    versions.add(index.version)
    changed = {
        "hnsw": {"ef_search": 41},
        "factory": {"search": "nprobe=9"},
    }.get(config.kind, {"nprobe": 9})
    versions.add(index.searching(**changed).version)
    index.options = replace(index.options, **changed)
    assert index.version in versions
    assert len(versions) == 4


def test_fewer_lists_find_less():
    index = build_index(GALLERY, IndexConfig("ivf", {"nlist": 64, "nprobe": 64}))
    recalls = [
        recall_of(index.searching(nprobe=nprobe).search(QUERIES, 20)[1], NEAREST)
        for nprobe in (1, 8, 64)
    ]
    assert recalls[0] < recalls[1] < recalls[2] == 1


def test_lists_that_hold_fewer_are_filled_up():
    index = build_index(GALLERY[:100], IndexConfig("ivf", {"nlist": 50, "nprobe": 1}))
    distances, positions = index.search(QUERIES, 30)
    assert ((positions == -1) == np.isposinf(distances)).all()
    assert (positions[:, -1] == -1).all()


def test_ef_search_below_k_is_raised_to_k():
    low, high = (
        build_index(GALLERY, IndexConfig("hnsw", {"ef_search": ef})).search(QUERIES, 20)
        for ef in (1, 20)
    )
    np.testing.assert_array_equal(low[1], high[1])


def test_vectors_are_given_back(config):
    index = build_index(GALLERY[:300], config)
    index.remove(np.array([0, 5]))
    left = np.delete(GALLERY[:300], [0, 5], axis=0)
    slack = {"hnsw": 0, "ivf": 0, "ivf-pq": 2e-3, "factory": 5e-2}[config.kind]
    positions = np.array([[0, 297], [4, 3]])
    np.testing.assert_allclose(index.vectors_at(positions), left[positions], atol=slack)


def test_what_was_removed_stays_removed_when_saved(config, tmp_path):
    index = build_index(GALLERY, config)
    index.remove(np.arange(0, 2000, 2))
    index.add(GALLERY[:2])
    index.save(tmp_path)
    loaded = find_index(config.kind).load(tmp_path, config.index_options())
    assert (loaded.version, len(loaded)) == (index.version, 1002)
    left = np.concatenate([GALLERY[1::2], GALLERY[:2]])
    found = loaded.search(left, 1)[1].ravel()
    assert (found == np.arange(1002)).mean() > 0.97
    for one in (index, loaded):
        one.add(GALLERY[2:4])
    assert loaded.version == index.version


def test_a_loaded_index_is_shared_memory_until_it_grows(tmp_path):
    """Anonymous memory is what no other process shares."""
    folder = tmp_path / "index"
    folder.mkdir()
    build_index(drawn(20_000, 128), IndexConfig("ivf", {"nlist": 16, "nprobe": 8})).save(folder)
    code = f"""
import re
from pathlib import Path
import numpy as np
from rcir.index import find_index
kind = find_index("ivf")
def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = anonymous()
index = kind.load(Path({str(folder)!r}), kind.Options(nlist=16, nprobe=8))
index.search(np.zeros((3, 128), np.float32), 5)
mapped = anonymous()
index.add(np.ones((1, 128), np.float32))
print((mapped - before) * 1024, (anonymous() - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mapped, grown = map(int, done.stdout.split())
    assert mapped < 20_000 * 128 * 4 / 3 < 20_000 * 128 * 4 * 0.9 < grown


@pytest.mark.parametrize("copied", [deepcopy, lambda index: loads(dumps(index))])
def test_a_copy_of_a_loaded_index_grows(config, folder, copied):
    loaded = find_index(config.kind).load(folder, config.index_options())
    other = copied(loaded)
    other.add(GALLERY[300:302])
    assert (len(other), len(loaded)) == (302, 300)
    assert other.search(GALLERY[300:302], 1)[1].tolist() == [[300], [301]]


@pytest.mark.parametrize("shared", [copy, lambda index: index.searching()])
def test_indexes_that_share_their_contents_know_of_each_others_changes(config, folder, shared):
    loaded = find_index(config.kind).load(folder, config.index_options())
    other, version = shared(loaded), loaded.version
    assert other.version == version
    other.add(GALLERY[300:302])
    assert (len(loaded), len(other)) == (302, 302)
    assert loaded.version == other.version != version
    loaded.remove(np.arange(300))
    assert other.search(GALLERY[300:302], 1)[1].tolist() == [[0], [1]]


@pytest.mark.parametrize("name", ["index.faiss", "vectors.npy"])
def test_a_file_that_is_written_to_after_loading_is_another_version(tmp_path, name):
    config = CONFIGS[2]
    build_index(GALLERY[:300], config).save(tmp_path)
    loaded = find_index(config.kind).load(tmp_path, config.index_options())
    version = loaded.version
    with (tmp_path / name).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"0")
    assert loaded.version != version
    (tmp_path / name).unlink()  # as whoever replaces the folder does: it is still there
    assert loaded.version not in (version, loaded.version)


def test_an_interrupted_addition_leaves_nothing(config, monkeypatch):
    index = build_index(GALLERY[:300], config)
    before, add = index.search(QUERIES, 5), type(index)._add

    def interrupted(self, batch):
        add(self, batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(index), "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index.add(QUERIES)
    assert len(index) == 300
    assert set(np.unique(index.search(QUERIES, 5)[1])) <= set(range(300))
    index.add(GALLERY[300:310])
    assert index.search(GALLERY[300:310], 1)[1].ravel().tolist() == list(range(300, 310))
    assert index.search(QUERIES, 0)[0].shape == (50, 0)
    assert before[1].shape == (50, 5)


def test_what_was_written_to_is_not_searched(config, folder):
    loaded = find_index(config.kind).load(folder, config.index_options())
    version = loaded.version
    with (folder / "index.faiss").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"7")
    with pytest.raises(StaleCalibration, match="somebody wrote to the files"):
        loaded.search(QUERIES, 1)
    assert loaded.version != version


def test_adding_says_how_far_it_is(caplog):
    with caplog.at_level("INFO", "rcir.index"):
        build_index(GALLERY[:300], CONFIGS[0])
    assert [record.message for record in caplog.records] == ["300 of 300 vectors added"]


@pytest.mark.parametrize("config", CONFIGS[1:3], ids=["ivf", "ivf-pq"])
def test_centroids_on_another_device_fill_the_same_lists(config, monkeypatch):
    """As where there is a GPU: FAISS's copy of the centroids is a plain one here."""
    import faiss

    plain, copies = build_index(GALLERY, config), []

    def copied(index):
        copies.append(faiss.clone_index(index))
        return copies[-1]

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", copied)
    other = build_index(GALLERY, config)
    assert len(copies) == 2  # for training, and for adding
    np.testing.assert_array_equal(other.search(QUERIES, 20)[1], plain.search(QUERIES, 20)[1])


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "longer"])
def test_a_damaged_file_is_refused_by_its_checksum(config, folder, damage):
    path = folder / "index.faiss"
    whole = path.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 7).astype(int):
        flipped = whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        damaged = {"cut": whole[:place], "empty": b"", "flipped": flipped, "longer": whole + b"0"}
        path.write_bytes(damaged[damage])
        with pytest.raises(InvalidData, match="checksum differs"):
            find_index(config.kind).load(folder, config.index_options())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_somebody_made_up_ends_no_process(config, folder, share, cut):
    """Its checksum is right: it is refused, or is an index that can be searched."""
    path = folder / "index.faiss"
    whole = path.read_bytes()
    place = int(share * len(whole))
    made_up = whole[:place] + (b"" if cut else b"\xff" * 64 + whole[place + 64 :])
    path.write_bytes(made_up)
    state = json.loads((folder / "index.json").read_text())
    state["sha256"] = hashlib.sha256(made_up).hexdigest()
    (folder / "index.json").write_text(json.dumps(state))
    try:
        loaded = find_index(config.kind).load(folder, config.index_options())
    except (InvalidData, ValueError):
        return
    assert not cut
    loaded.search(QUERIES, 3)


@pytest.mark.parametrize("name", ["index.json", "index.faiss"])
def test_a_missing_file_is_an_exception(config, folder, name):
    (folder / name).unlink()
    with pytest.raises(OSError):
        find_index(config.kind).load(folder, config.index_options())


def test_an_index_of_other_options_is_refused(folder, config):
    other = {"hnsw": "ivf", "ivf": "hnsw", "ivf-pq": "ivf", "factory": "hnsw"}[config.kind]
    with pytest.raises(InvalidData, match="another index"):
        find_index(other).load(folder, IndexConfig(other).index_options())


@pytest.mark.parametrize(
    "live", [np.array([3, 1]), np.array([-1, 2]), np.array([0, 300]), np.array([0.0]), np.eye(2)]
)
def test_numbers_of_vectors_that_are_not_there_are_refused(live, tmp_path):
    build_index(GALLERY[:300], CONFIGS[0]).save(tmp_path)
    np.save(tmp_path / "live.npy", live)
    with pytest.raises(InvalidData, match=r"live\.npy"):
        find_index("hnsw").load(tmp_path, CONFIGS[0].index_options())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("hnsw", {"M": 1}, "M is 1; from 2 to 256"),
        ("hnsw", {"ef_search": 0}, "ef_search is 0"),
        ("ivf", {"nlist": 0}, "nlist is 0"),
        ("ivf", {"nprobe": 2.5}, "nprobe is 2.5; it must be a whole number"),
        ("ivf-pq", {"nbits": 13}, "nbits is 13; from 4 to 12"),
        ("ivf-pq", {"k_factor": 0.5}, "k_factor is 0.5"),
        ("factory", {"factory": ""}, "factory is empty"),
        ("factory", {"search": "probes=3"}, "'probes=3' is no search parameter; give NAME=NUMBER"),
        ("factory", {"search": "nprobe=x"}, "'nprobe=x' is no search parameter"),
        ("factory", {"search": "nprobe=0"}, "nprobe is 0; at least 1"),
        ("auto", {"recall": 1.5}, "recall is 1.5"),
        ("hnsw", {"nlist": 3}, "there is no option nlist; there are M, ef_construction"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, said):
    with pytest.raises(InvalidConfig, match=said):
        IndexConfig(kind, options)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "ivf-pq",
            {"m": 5},
            "m is 5, which does not divide the length 16 .* one of 1, 2, 4, 8, 16",
        ),
        (
            "factory",
            {"factory": "Round3"},
            "no such index: could not parse index string Round3",
        ),
        ("factory", {"factory": "PQ3x4"}, "index: The dimension .* multiple of the number of sub"),
        ("factory", {"search": "nprobe=3"}, "'HNSW32' has no search parameter nprobe; .* efSearch"),
        ("factory", {"factory": "L2norm,Flat"}, "bring the vectors to unit length before"),
        (
            "factory",
            {"factory": "IDMap,Flat"},
            "to this index: add does not .* use add_with_ids",
        ),
    ],
)
def test_what_faiss_cannot_make_is_refused_in_words(kind, options, said):
    with pytest.raises(InvalidConfig, match=said):
        build_index(GALLERY, IndexConfig(kind, options))


def test_numbers_beyond_half_precision_are_refused_and_not_added():
    config = CONFIGS[2]
    index = build_index(GALLERY[:300], config)
    large = GALLERY[:3].copy()
    large[1, 1] = 70_000
    with pytest.raises(InvalidData, match="half precision"):
        index.add(large)
    assert len(index) == 300


def test_codes_alone_are_less_exact():
    options = {"nlist": 16, "nprobe": 16, "m": 4, "nbits": 6}
    ranked, coded = (
        build_index(GALLERY, IndexConfig("ivf-pq", options | {"exact": exact}))
        for exact in (True, False)
    )
    recalls = [recall_of(one.search(QUERIES, 20)[1], NEAREST) for one in (coded, ranked)]
    assert recalls[0] < recalls[1]
    assert coded.version != ranked.version


@pytest.fixture
def few(monkeypatch):
    """`auto` takes approximate indexes of as few vectors as there are here."""
    monkeypatch.setattr(auto, "EXACT_UP_TO", 500)
    monkeypatch.setattr(auto, "_WIDER", (1.0,))  # so that HNSW misses some


@pytest.mark.parametrize(
    ("n", "options", "kind", "why"),
    [
        (400, {}, "flat", "400 vectors: exact search is fast"),
        (2000, {"depth": 20, "recall": 0.7}, "hnsw", "hnsw finds 0.* at least 0.7"),
        (2000, {"depth": 20, "recall": 1.0}, "flat", "hnsw finds .*, with 1 asked for, so exact"),
        (2000, {"depth": 20, "memory_gib": 1e-4}, "ivf-pq", "vectors take .* ivf-pq finds"),
        (2000, {"memory_gib": 2e-4}, "flat", "hnsw would take .* 0.0002 GiB allowed, so exact"),
    ],
)
def test_the_chosen_index_suits_number_memory_and_recall(few, n, options, kind, why):
    import re

    index = build_index(GALLERY[:n], IndexConfig("auto", options))
    named = IndexConfig.of(index)
    assert named.kind == kind
    assert re.search(why, index.why)
    if kind == "hnsw":
        assert recall_of(index.search(QUERIES, 20)[1], NEAREST) > 0.75
    if "memory_gib" in options:
        assert index.memory <= options["memory_gib"] * 2**30


def test_no_memory_for_any_index_is_refused(few):
    with pytest.raises(InvalidConfig, match="holds no index of 2000 vectors"):
        build_index(GALLERY, IndexConfig("auto", {"memory_gib": 1e-6}))


def calibrated(config):
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((12, 16))
    labels = [rng.integers(12, size=n) for n in (900, 700)]
    vectors = [centres[each] + 0.6 * rng.standard_normal((len(each), 16)) for each in labels]
    retriever = rcir.Retriever.from_embeddings(vectors[0], labels=labels[0], depth=30, index=config)
    retriever.calibrate(vectors[1], labels[1], "quantile")
    return retriever, vectors[1][:40]


def test_a_changed_search_parameter_is_a_stale_calibration(config, tmp_path):
    retriever, queries = calibrated(config)
    folder = retriever.save(tmp_path / "retriever")
    loaded = rcir.load(folder)
    before, after = (
        [answer.to_dict() for answer in one.retrieve(queries, 0.2, 0.1)]
        for one in (retriever, loaded)
    )
    assert before == after
    changed = {"hnsw": {"ef_search": 99}, "factory": {"search": "nprobe=3"}}
    loaded.index.options = replace(loaded.index.options, **changed.get(config.kind, {"nprobe": 3}))
    assert loaded.changes() == ["index"]
    with pytest.raises(StaleCalibration, match="index"):
        loaded.retrieve(queries, 0.2, 0.1)
    loaded.recalibrate()
    loaded.retrieve(queries, 0.2, 0.1)


def test_a_retriever_says_why_its_index_was_chosen(tmp_path, few):
    retriever, _ = calibrated(IndexConfig("auto", {"depth": 30, "recall": 0.5}))
    loaded = storage.load(retriever.save(tmp_path / "retriever"))
    assert IndexConfig.of(loaded.index).kind == "hnsw"
    assert loaded.index.why == retriever.index.why
    described = json.loads((tmp_path / "retriever" / "retriever.json").read_text())["index"]
    assert described["options"]["ef_search"] == retriever.index.options.ef_search


FACTORIES = {
    "Flat": "",
    "IVF16,Flat": "nprobe=8",
    "IVF16_HNSW32,Flat": "nprobe=8,quantizer_efSearch=20",
    "IVF16,PQ8x4,RFlat": "nprobe=16,k_factor=8",
    "OPQ8,IVF16,PQ8x4": "nprobe=16",
    "PCA16,IVF16,SQ8": "nprobe=8",
    "HNSW16,SQfp16": "efSearch=64",
    "SQ8": "",
    "LSH": "",
    "PQ8x4fs": "",
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_indexes_of_the_factory_are_built_searched_saved_and_loaded(factory, tmp_path):
    config = IndexConfig("factory", {"factory": factory, "search": FACTORIES[factory]})
    index = build_index(GALLERY, config)
    index.save(tmp_path)
    loaded = find_index("factory").load(tmp_path, config.index_options())
    assert loaded.version == index.version
    found = index.search(QUERIES, 20)[1]
    np.testing.assert_array_equal(loaded.search(QUERIES, 20)[1], found)
    if factory not in ("LSH", "PQ8x4fs"):
        assert recall_of(found, NEAREST) > (0.4 if "PQ8" in factory else 0.85)
    if factory in ("LSH", "PQ8x4fs"):
        with pytest.raises(InvalidConfig, match="nothing can be removed"):
            loaded.remove(np.array([3, 5]))
        np.testing.assert_array_equal(loaded.search(QUERIES, 20)[1], found)
    else:
        loaded.remove(np.array([3, 5]))
        assert len(loaded) == 1998
        loaded.search(QUERIES, 3)
        loaded.remove(np.arange(1998))
        loaded.add(GALLERY[:5])
        assert loaded.search(GALLERY[:1], 5)[1][0, 0] == 0


@pytest.mark.parametrize("factory", ["IVF64,Flat", "IVF64,PQ8x4,RFlat", "PCA8,IVF64,Flat"])
def test_search_parameters_of_one_are_not_those_of_another(factory, tmp_path):
    """They are given with each search, never set on what is shared."""
    config = IndexConfig("factory", {"factory": factory})
    index = build_index(GALLERY, config)
    before, version = index.search(QUERIES, 20)[1], index.version
    wide = index.searching(search="nprobe=64")
    assert recall_of(wide.search(QUERIES, 20)[1], NEAREST) > 1.3 * recall_of(before, NEAREST)
    np.testing.assert_array_equal(index.search(QUERIES, 20)[1], before)
    assert index.version == version
    index.options = wide.options
    np.testing.assert_array_equal(index.search(QUERIES, 20)[1], wide.search(QUERIES, 20)[1])
    index.save(tmp_path)
    loaded = find_index("factory").load(tmp_path, wide.options)
    assert loaded.version == index.version == wide.version


@pytest.mark.parametrize(
    ("kind", "parameters", "said"),
    [
        ("hnsw", {"ef_search": "x"}, "ef_search is 'x'; it must be a whole number"),
        ("hnsw", {"ef_search": 2.5}, "ef_search is 2.5; it must be a whole number"),
        ("hnsw", {"nprobe": 2}, "no search parameter nprobe; there are ef_search"),
        ("hnsw", {"M": 8}, "no search parameter M"),
        ("ivf-pq", {"exact": False}, "no search parameter exact; there are nprobe, k_factor"),
        ("ivf", {"nprobe": 0}, "nprobe is 0"),
    ],
)
def test_what_is_no_search_parameter_is_refused(kind, parameters, said):
    config = next(config for config in CONFIGS if config.kind == kind)
    with pytest.raises(InvalidConfig, match=said):
        build_index(GALLERY[:300], config).searching(**parameters)


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "factory"])
def test_a_query_among_what_was_removed_still_finds_others(kind):
    """Nothing is left in its lists, or near it in the graph."""
    near = 0.01 * drawn(200, seed=2)
    gallery = np.concatenate([near, near + 50])
    options = {
        "ivf": {"nlist": 2, "nprobe": 1},
        "hnsw": {"M": 4, "ef_search": 4},
        "factory": {"factory": "IVF2,Flat"},
    }
    index = build_index(gallery, IndexConfig(kind, options[kind]))
    index.remove(np.arange(200))
    distances, positions = index.search(np.concatenate([near[:3], near[:3] + 50]), 4)
    assert np.isfinite(distances[:, 0]).all()
    assert (positions[:, 0] >= 0).all()


def test_options_that_numpy_holds_are_plain():
    config = IndexConfig("hnsw", {"M": np.int64(8)})
    assert type(config.options["M"]) is int
    build_index(GALLERY[:50], config)


@pytest.mark.parametrize("scale", [1e-8, 1e6])
def test_vectors_that_half_precision_loses_are_refused(scale):
    with pytest.raises(InvalidData, match=r"half precision keeps 6\.1e-05 to 65504"):
        build_index(GALLERY[:300] * np.float32(scale), CONFIGS[2])


def test_stored_vectors_that_are_no_numbers_are_refused(tmp_path):
    config = CONFIGS[2]
    build_index(GALLERY[:300], config).save(tmp_path)
    vectors = np.load(tmp_path / "vectors.npy")
    vectors[5, 3] = np.nan
    np.save(tmp_path / "vectors.npy", vectors)
    with pytest.raises(InvalidData, match="NaN or infinite"):
        find_index("ivf-pq").load(tmp_path, config.index_options())


@pytest.mark.parametrize("factory", ["OPQ4,IVF16,PQ4x4", "IVF16,PQ4x4,RFlat"])
def test_ids_that_are_not_there_are_found_within_other_indexes(factory, tmp_path):
    import faiss

    config = IndexConfig("factory", {"factory": factory})
    build_index(GALLERY, config).save(tmp_path)
    path = tmp_path / "index.faiss"
    held = faiss.read_index(str(path))
    outer = faiss.downcast_index(held)
    inner = outer.index if isinstance(outer, faiss.IndexPreTransform) else outer.base_index
    lists = faiss.downcast_index(inner).invlists
    faiss.rev_swig_ptr(lists.get_ids(0), lists.list_size(0))[:] = 10**9
    faiss.write_index(held, str(path))
    state = json.loads((tmp_path / "index.json").read_text())
    state["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "index.json").write_text(json.dumps(state))
    with pytest.raises(InvalidData, match="can read and search"):
        find_index("factory").load(tmp_path, config.index_options())


def test_a_graph_of_many_is_not_built_without_a_gpu():
    with pytest.raises(InvalidConfig, match="cagra needs a GPU and a FAISS built with cuVS"):
        build_index(GALLERY, IndexConfig("cagra"))


@pytest.mark.gpu
def test_a_graph_that_a_gpu_built_is_searched_saved_and_added_to(tmp_path):
    faiss = pytest.importorskip("faiss")
    if faiss.get_num_gpus() == 0 or not hasattr(faiss, "GpuIndexCagra"):
        pytest.skip("this FAISS has no GPU with cuVS")
    config = IndexConfig("cagra", {"ef_search": 100})
    index = build_index(GALLERY, config)
    assert recall_of(index.search(QUERIES, 20)[1], NEAREST) >= 0.9
    index.add(QUERIES)
    index.save(tmp_path)
    loaded = find_index("cagra").load(tmp_path, config.index_options())
    assert loaded.version == index.version
    assert (loaded.search(QUERIES, 1)[1].ravel() == 2000 + np.arange(50)).all()


@pytest.mark.gpu
def test_training_on_a_gpu_finds_as_much():
    faiss = pytest.importorskip("faiss")
    if faiss.get_num_gpus() == 0:
        pytest.skip("this FAISS has no GPU")
    config = IndexConfig("ivf", {"nlist": 16, "nprobe": 8})
    index = build_index(GALLERY, config)
    assert index._index.clustering_index is not None
    assert recall_of(index.search(QUERIES, 20)[1], NEAREST) >= 0.9


def test_what_faiss_does_for_torch_is_survived():
    code = (
        "import numpy as np\n"
        "import faiss.contrib.torch_utils\n"
        "from rcir.index import IndexConfig, build_index\n"
        "vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)\n"
        "options = {'nlist': 4, 'nprobe': 4, 'm': 2, 'nbits': 4}\n"
        "for kind, given in (('hnsw', {}), ('ivf-pq', options)):\n"
        "    index = build_index(vectors, IndexConfig(kind, given))\n"
        "    index.remove(np.array([0]))\n"
        "    assert index.search(vectors[1:4], 1)[1].ravel().tolist() == [0, 1, 2], kind\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
