"""`rcir certify`: from files of vectors to a retriever, a report, and a measured guarantee."""

import json

import numpy as np
import pytest

import rcir
from calibration import CertificationConfig, certify, progress
from rcir.cli import main
from rcir.data.vector_writing import write_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.index import IndexConfig

pytestmark = pytest.mark.usefixtures("undrawn")
CENTRES = np.random.default_rng(0).standard_normal((10, 6))


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=n)
    return (CENTRES[labels] + 0.6 * rng.standard_normal((n, 6))).astype(np.float32), labels


GALLERY, LABELS = drawn(300, 1)
ASKED, ASKED_LABELS = drawn(600, 2)
NAMES = np.array([f"kind {number}" for number in range(10)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A gallery and queries in files, where commands are given."""
    write(tmp_path, "gallery", GALLERY, label=NAMES[LABELS])
    write(tmp_path, "queries", ASKED, label=NAMES[ASKED_LABELS])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, name, vectors, **columns):
    ids = np.array([f"{name}/{row}" for row in range(len(vectors))])
    np.savez(folder / f"{name}.npz", vector=vectors, **{"id": ids} | columns)


def config(**changed):
    return CertificationConfig(
        **{"gallery": "gallery.npz", "queries": "queries.npz", "output": "out"} | changed
    )


def test_the_command_prints_the_table_and_writes_what_it_says(folder, capsys):
    assert main(["certify", "--gallery", "gallery.npz", "--queries", "queries.npz"]) == 0
    shown = capsys.readouterr().out
    assert "With probability at least 0.9, a true match is missing" in shown
    assert "300 calibration queries" in shown
    assert "retriever: runs/certified/retriever" in shown
    results = json.loads((folder / "runs/certified/results.json").read_text())
    assert (results["dataset"], results["encoder"]) == ("gallery", "vectors")
    assert (results["n_calibration"], results["n_test"]) == (300, 150)
    assert "<h1>" in (folder / "runs/certified/report.html").read_text()
    answer = rcir.load("runs/certified/retriever").retrieve(ASKED[0], alpha=0.2, delta=0.1)
    assert answer.ids[0].startswith("gallery/")
    assert answer.labels[0].startswith("kind ")


def test_the_three_parts_share_no_query_and_the_risk_is_of_the_third(folder):
    outcome = certify(config(score_function="constant", alphas=(0.2,)))
    own = outcome.retriever
    parts = [own.tuning_queries.vectors, own.calibration_queries.vectors]
    seen = {tuple(row) for part in parts for row in part.tolist()}
    assert len(seen) == 450
    unit = ASKED / np.linalg.norm(ASKED, axis=1, keepdims=True)
    held = np.array([tuple(row) not in seen for row in unit.tolist()])
    assert held.sum() == 150
    answers = own.retrieve(ASKED[held], 0.2, 0.1)
    labels = NAMES[ASKED_LABELS[held]]
    missed = [label not in one.labels for label, one in zip(labels, answers, strict=True)]
    assert outcome.evaluation.rows[0].test_risk == pytest.approx(np.mean(missed))


def test_queries_that_are_gallery_items_are_left_out_of_their_search(folder, capsys):
    for queries in (None, "gallery.npz"):
        outcome = certify(config(queries=queries, output=f"out-{queries}"))
        assert "each is left out of its own search" in capsys.readouterr().out
        assert outcome.retriever.options.leave_one_out
        assert outcome.evaluation.quality.numbers["recall_at_1"] < 1
    write(folder, "gallery", GALLERY, label=NAMES[LABELS], model="m")
    write(folder, "queries", GALLERY, label=NAMES[LABELS])  # other ids
    with pytest.raises(InvalidData, match="are pictures of the gallery"):
        certify(config())


@pytest.mark.parametrize("queries", [None, "queries.npz"])
def test_copies_of_queries_are_left_out(folder, capsys, queries):
    name = "gallery" if queries is None else "queries"
    vectors, labels = (GALLERY, LABELS) if queries is None else (ASKED, ASKED_LABELS)
    rows = np.r_[np.arange(len(vectors)), :30]
    write(folder, name, vectors[rows], label=NAMES[labels[rows]])
    own = certify(config(queries=queries, alphas=(0.3,), score_function="constant")).retriever
    assert f"30 of {len(rows)} queries came before among them" in capsys.readouterr().out
    asked = np.concatenate([own.tuning_queries.vectors, own.calibration_queries.vectors])
    assert len(np.unique(asked, axis=0)) == len(asked) == 0.75 * len(vectors)


@pytest.mark.parametrize("own", [False, True])
def test_a_gallery_in_shards_is_that_of_one_file(folder, own):
    (folder / "shards").mkdir()
    known = [f"gallery/{row}" for row in range(300)], NAMES[LABELS].tolist()
    for number, start in enumerate((0, 70, 160)):
        rows = slice(start, (70, 160, 300)[number])
        ids, labels = (values[rows] for values in known)
        file = folder / "shards" / f"part-0000{number}.parquet"
        write_vectors(file, GALLERY[rows], ids, {"label": labels}, None, "m", shards=3)
    known = np.array(known[0])
    np.savez("gallery.npz", vector=GALLERY, id=known, label=NAMES[LABELS], model="m")
    np.savez("queries.npz", vector=ASKED, label=NAMES[ASKED_LABELS], model="m")
    made = []
    for place in ("gallery.npz", "shards"):
        queries = {"queries": None} if own else {}
        chosen = {"alphas": (0.3,), "score_function": "constant"} | queries
        made.append(certify(config(gallery=place, output=f"out-{place}", **chosen)).retriever)
    one, several = made
    assert several.ids.tolist() == one.ids.tolist()
    assert several.index.version == one.index.version
    assert several.label_names == one.label_names
    answers = [each.retrieve(ASKED[:20], 0.3, 0.1, model="m") for each in made]
    assert [each.to_dict() for each in answers[0]] == [each.to_dict() for each in answers[1]]


def test_the_index_is_the_named_one_and_says_how_far_it_is(folder, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 0.0)
    given = ["--index", "ivf", "--index_option", "nlist=8", "--index_option", "nprobe=3"]
    main(["certify", "--gallery", "gallery.npz", "--queries", "queries.npz", *given])
    assert "index: 300 of 300 vectors added" in capsys.readouterr().out
    made = IndexConfig.of(rcir.load("runs/certified/retriever").index)
    assert (made.kind, made.options["nlist"], made.options["nprobe"]) == ("ivf", 8, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--index", "round"], "'round' is unknown; choose one of flat, hnsw"),
        (["--index", "hnsw", "--index_option", "nprobe=3"], "there is no option nprobe"),
        (["--index_option", "nprobe=3"], "options of flat: there is no option nprobe"),
    ],
)
def test_what_names_no_index_is_refused(folder, capsys, given, said):
    with pytest.raises(SystemExit):
        main(["certify", "--gallery", "gallery.npz", "--queries", "queries.npz", *given])
    assert said in capsys.readouterr().err


def test_clusters_calibrate_by_cluster(folder, capsys):
    clusters = np.repeat(np.arange(120), 5).astype(str)
    write(folder, "queries", ASKED, label=NAMES[ASKED_LABELS], cluster=clusters)
    main(["certify", "--gallery", "gallery.npz", "--queries", "queries.npz", "--alpha", "0.4"])
    assert "returned to queries of any further cluster like the 60 of" in " ".join(
        capsys.readouterr().out.split()
    )


def test_videos_without_a_column_are_warned_of(folder, capsys):
    noise = 0.1 * np.random.default_rng(0).standard_normal((600, 6))
    frames = np.repeat(ASKED[:120], 5, axis=0) + noise
    write(folder, "queries", frames, label=NAMES[np.repeat(ASKED_LABELS[:120], 5)])
    main(["certify", "--gallery", "gallery.npz", "--queries", "queries.npz"])
    shown = capsys.readouterr()
    assert "warning: " in shown.err
    assert "frames of one video" in shown.err


def test_a_radius_needs_places(folder):
    with pytest.raises(InvalidConfig, match=r"--radius is 3.0, and gallery.npz has no places"):
        certify(config(radius=3.0))


def test_places_need_a_radius(folder):
    rng = np.random.default_rng(0)
    for name, vectors in (("gallery", GALLERY), ("queries", ASKED)):
        x, y = rng.uniform(0, 9, (2, len(vectors)))
        vectors = np.column_stack([x, y, vectors])
        write(folder, name, vectors, x=x, y=y)
    with pytest.raises(InvalidConfig, match=r"within which radius they match \(--radius\)"):
        certify(config(metric="euclidean"))
    outcome = certify(config(metric="euclidean", radius=3.0))
    assert outcome.retriever.relevance.radius == 3


def test_a_table_of_matches_says_what_is_true(folder):
    by_label = certify(config(output="labels", score_function="constant"))
    write(folder, "gallery", GALLERY)
    write(folder, "queries", ASKED)
    with pytest.raises(InvalidData, match=r"no column label, labels, or x and y.*\(--matches\)"):
        certify(config())
    rows, items = np.nonzero(ASKED_LABELS[:, None] == LABELS)
    pairs = [f"queries/{row},gallery/{item}" for row, item in zip(rows, items, strict=True)]
    (folder / "matches.csv").write_text("\n".join(["query,gallery", *pairs]))
    by_table = certify(config(matches="matches.csv", score_function="constant"))
    risks = [[row.test_risk for row in one.evaluation.rows] for one in (by_label, by_table)]
    assert risks[0] == risks[1]


def changed(folder, name, **columns):
    vectors, labels = (GALLERY, LABELS) if name == "gallery" else (ASKED, ASKED_LABELS)
    given = {"vectors": vectors, "label": NAMES[labels]} | columns
    write(folder, name, given.pop("vectors"), **given)


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("gallery", {"vectors": np.full_like(GALLERY, np.nan)}, "NaN or infinite"),
        ("queries", {"vectors": ASKED[:, :5]}, r", 5\); needed is \(n, 6\)"),
        ("queries", {"vectors": np.zeros_like(ASKED)}, "600 of 600 vectors are zero"),
        ("gallery", {"id": np.array(["a"] * 300)}, r"some ids come twice \(a\)"),
        ("queries", {"label": ASKED_LABELS}, "labels of the queries are of type int64"),
        ("queries", {"vectors": ASKED[:10], "label": NAMES[:10]}, "10 queries, of which 5 calib"),
        ("queries", {"vectors": GALLERY, "label": NAMES[LABELS]}, "are pictures of the gallery"),
    ],
    ids=range(7),
)
def test_what_cannot_be_certified_writes_nothing(folder, name, columns, said):
    changed(folder, name, **columns)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InvalidData, match=said):
        certify(config())
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_seed_below_0_is_refused():
    with pytest.raises(InvalidConfig, match="seed is -1; at least 0"):
        config(seed=-1)


def test_models_are_told_apart(folder):
    changed(folder, "gallery", model="clip-1")
    changed(folder, "queries", model="clip-2")
    with pytest.raises(InvalidData, match="of clip-2, those of the gallery of clip-1"):
        certify(config())
    changed(folder, "queries", model="clip-1")
    outcome = certify(config())
    assert outcome.retriever.options.model == outcome.evaluation.encoder == "clip-1"


def test_places_that_hold_something_else_are_left_alone(folder):
    (folder / "out").mkdir()
    (folder / "out" / "report.html").write_text("mine")
    with pytest.raises(InvalidData, match="of something else: choose another output"):
        certify(config())
    assert (folder / "out" / "report.html").read_text() == "mine"


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(DataUnavailable, match=r"there is no file none\.npz"):
        certify(config(queries="none.npz"))


def test_nothing_certified_ends_with_status_3(folder, capsys):
    shuffled = np.random.default_rng(0).permutation(ASKED_LABELS)
    changed(folder, "queries", label=NAMES[shuffled])
    asked = ["--queries", "queries.npz", "--depth", "2", "--alpha", "0.2"]
    with pytest.raises(SystemExit) as ended:
        main(["certify", "--gallery", "gallery.npz", *asked])
    assert ended.value.code == 3
    assert "Nothing is certified with probability 0.9" in capsys.readouterr().out
