"""`rcir certify`: from files of vectors to a retriever, a report, and a measured guarantee."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import rcir
from calibration import CertificationConfig, certify, cost, promise, recalibrate
from rcir.cli import main
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.index import IndexConfig
from tests.vectors import draw_vectors

pytestmark = pytest.mark.usefixtures("no_figures")
GALLERY, LABELS = draw_vectors(300, 1)
ASKED, ASKED_LABELS = draw_vectors(600, 2)
NAMES = np.array([f"kind {number}" for number in range(10)])
QUICK = {"alphas": (0.3,), "score_function": "constant"}


@pytest.fixture
def folder(tmp_path):
    """A gallery and queries in files, where commands are given."""
    change(tmp_path, "gallery")
    change(tmp_path, "queries")
    return tmp_path


def write(folder, name, vectors, **columns):
    ids = np.array([f"{name}/{row}" for row in range(len(vectors))])
    np.savez(folder / f"{name}.npz", vector=vectors, **{"id": ids} | columns)


def change(folder, name, **columns):
    vectors, labels = (GALLERY, LABELS) if name == "gallery" else (ASKED, ASKED_LABELS)
    values = {"vectors": vectors, "label": NAMES[labels]} | columns
    write(folder, name, values.pop("vectors"), **values)


def config(**changed):
    return CertificationConfig(
        **{"gallery": "gallery.npz", "queries": "queries.npz", "output": "out"} | changed
    )


COMMAND = ["certify", "gallery.npz", "--queries", "queries.npz"]


def test_the_command_builds_the_named_index_prints_and_writes(folder, capsys):
    options = ["--index", "ivf", "--index_option", "nlist=8", "--index_option", "nprobe=3"]
    options += ["--score-function", "constant", "--seed", "3"]
    assert main([*COMMAND, *options]) == 0
    shown = capsys.readouterr().out
    assert "on average at least 90 of 100 future queries" in " ".join(shown.split())
    assert "retriever: runs/certified/retriever" in shown
    results = json.loads((folder / "runs/certified/results.json").read_text())
    assert (results["dataset"], results["encoder"]) == ("gallery", "vectors")
    assert (results["n_calibration"], results["n_test"]) == (300, 150)
    assert "<h1>" in (folder / "runs/certified/report.html").read_text()
    index = IndexConfig.of(rcir.load("runs/certified/retriever").index)
    assert (index.kind, index.options["nlist"], index.options["nprobe"]) == ("ivf", 8, 3)


def test_the_three_parts_share_no_query_and_the_risk_is_of_the_third(folder):
    outcome = certify(config(score_function="constant", alphas=(0.2,)))
    own = outcome.retriever
    parts = [own.calibration.tuning_queries.vectors, own.calibration.calibration_queries.vectors]
    seen = {tuple(row) for part in parts for row in part.tolist()}
    assert len(seen) == 450
    unit = ASKED / np.linalg.norm(ASKED, axis=1, keepdims=True)
    held = np.array([tuple(row) not in seen for row in unit.tolist()])
    assert held.sum() == 150
    answers = own.retrieve(ASKED[held], 0.2, 0.1)
    assert answers[0].ids[0].startswith("gallery/")
    assert answers[0].labels[0].startswith("kind ")
    labels = NAMES[ASKED_LABELS[held]]
    missed = [label not in one.labels for label, one in zip(labels, answers, strict=True)]
    assert outcome.evaluation.rows[0].test_risk == pytest.approx(np.mean(missed))


@pytest.mark.parametrize("queries", [None, "gallery.npz"])
def test_queries_that_are_gallery_items_are_left_out_of_their_search(folder, capsys, queries):
    change(folder, "gallery", split=np.resize(["gallery", "query"], 300))
    outcome = certify(config(queries=queries, **QUICK))
    shown = capsys.readouterr().out
    assert "note: the column split" in shown
    assert "The queries are gallery items" in shown
    assert outcome.retriever.searcher.options.leave_one_out
    assert outcome.evaluation.quality.numbers["recall_at_1"] < 1


def test_copies_of_queries_are_left_out(folder, capsys):
    rows = np.r_[:600, :30]
    write(folder, "queries", ASKED[rows], label=NAMES[ASKED_LABELS[rows]])
    calibration = certify(config(**QUICK)).retriever.calibration
    assert "30 of 630 queries repeat others" in capsys.readouterr().out
    asked = np.concatenate(
        [calibration.tuning_queries.vectors, calibration.calibration_queries.vectors]
    )
    assert len(np.unique(asked, axis=0)) == len(asked) == 450


def test_a_retriever_that_was_chosen_is_measured_as_it_answers(folder):
    retriever = certify(config(**QUICK)).retriever
    retriever.calibration = replace(retriever.calibration, chosen_among=4)
    retriever.save(folder / "out" / "retriever")
    outcome = certify(config(**QUICK))
    (row,) = outcome.evaluation.rows
    assert (outcome.evaluation.delta, row.delta) == (0.1, pytest.approx(0.1 / 4))
    assert row.threshold == rcir.load(outcome.folder).guarantee(0.3, 0.1).threshold
    assert "at most 10%, also after the choice among 4" in promise(outcome.evaluation)
    stored = json.loads((folder / "out" / "results.json").read_text())
    assert (stored["chosen_among"], stored["rows"][0]["delta"]) == (4, row.delta)
    assert stored["left_out"] is None


def test_queries_that_were_added_one_by_one_certify_no_measured_guarantee_of_one_moment(folder):
    """Although the retriever was calibrated again on others between."""
    retriever = certify(config(**QUICK)).retriever
    added, added_labels = draw_vectors(60, 3)
    retriever.extend_calibration(added, NAMES[added_labels])
    others, labels = draw_vectors(300, 4)
    retriever.calibrate(others, NAMES[labels], "constant")
    assert not retriever.calibration.sequential
    retriever.save(folder / "out" / "retriever")
    outcome = certify(config(**QUICK))
    assert outcome.retriever.calibration.sequential
    (row,) = outcome.evaluation.rows
    assert row.threshold == outcome.retriever.guarantee(0.3, 0.1, anytime=True).threshold
    requests = {"recall": {"risk": "recall"}, "miss, whatever alpha": {"simultaneous": True}}
    for name, options in requests.items():
        (other,) = (row for row in outcome.evaluation.others if row.guarantee == name)
        with pytest.raises(InvalidConfig) as refused:
            outcome.retriever.retrieve(ASKED[:1], 0.3, 0.1, **options)
        assert (other.threshold, other.constant_size) == (None, None)
        assert other.refusal == str(refused.value)


def test_clusters_calibrate_by_cluster_and_are_warned_of_without_a_column(folder, capsys):
    clusters = np.repeat(np.arange(120), 5).astype(str)
    options = ["--alpha", "0.4", "--score_function", "constant"]
    change(folder, "queries", cluster=clusters)
    main([*COMMAND, *options])
    shown = " ".join(capsys.readouterr().out.split())
    assert "300 calibration queries in 60 clusters" in shown
    assert "--query-labels" not in shown  # which clusters do not allow
    noise = 0.1 * np.random.default_rng(0).standard_normal((600, 6))
    frames = np.repeat(ASKED[:120], 5, axis=0) + noise
    write(folder, "queries", frames, label=NAMES[np.repeat(ASKED_LABELS[:120], 5)])
    main([*COMMAND, *options])
    screen = capsys.readouterr()
    assert "frames of one video" in screen.err
    assert "--query-labels" in screen.out


def test_places_need_a_radius_and_a_radius_needs_places(folder):
    with pytest.raises(InvalidConfig, match="has no places"):
        certify(config(radius=3.0))
    rng = np.random.default_rng(0)
    for name, vectors in (("gallery", GALLERY), ("queries", ASKED)):
        x, y = rng.uniform(0, 9, (2, len(vectors))) + 30 * rng.integers(3, size=(2, len(vectors)))
        write(folder, name, np.column_stack([x, y, vectors]), x=x, y=y)
    with pytest.raises(InvalidConfig, match="--radius"):
        certify(config(metric="euclidean"))
    options = {"metric": "euclidean", "radius": 3.0, "score_function": "constant"}
    outcome = certify(config(**options))
    assert outcome.retriever.relevance.radius == 3
    assert outcome.evaluation.other_labels is None
    apart = certify(config(**options, tuning="labels", output="cells")).evaluation
    assert apart.other_labels == "30-wide cells"
    assert "the 30-wide cells of the calibration queries" in promise(apart)
    assert "with other 30-wide cells" in cost(apart)


def test_a_table_of_matches_defines_relevance(folder, capsys):
    few, labels = ASKED[:200], ASKED_LABELS[:200]
    write(folder, "queries", few, label=NAMES[labels])
    options = QUICK | {"tuning": "queries"}
    by_label = certify(config(output="labels", **options))
    write(folder, "gallery", GALLERY)
    write(folder, "queries", few)
    with pytest.raises(InvalidData, match="--matches"):
        certify(config())
    rows, items = np.nonzero(labels[:, None] == LABELS)
    pairs = [f"queries/{row},gallery/{item}" for row, item in zip(rows, items, strict=True)]
    table = folder / "matches.csv"
    table.write_text("query,gallery\nunknown,gallery/0")
    with pytest.raises(InvalidData, match="names no query"):
        certify(config(matches="matches.csv"))
    table.write_text("\n".join(["query,gallery", *pairs, "unknown,gallery/0"]))
    by_table = certify(config(matches="matches.csv", **options))
    assert by_table.evaluation.rows[0].test_risk == by_label.evaluation.rows[0].test_risk
    assert "1 rows of matches.csv are of other queries" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "columns", "word"),
    [
        ("queries", {"vectors": ASKED[:, :5]}, r"\(n, 6\)"),
        ("queries", {"vectors": np.zeros_like(ASKED)}, "zero"),
        ("queries", {"vectors": ASKED[:10], "label": NAMES[:10]}, "10 queries"),
        ("queries", {"vectors": GALLERY, "label": NAMES[LABELS]}, "pictures of the gallery"),
    ],
)
def test_vectors_that_cannot_be_certified_write_nothing(folder, name, columns, word):
    change(folder, name, **columns)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InvalidData, match=word):
        certify(config())
    assert sorted(path.name for path in folder.iterdir()) == before


def test_queries_of_another_model_are_refused(folder):
    change(folder, "gallery", model="clip-1")
    change(folder, "queries", model="clip-2")
    with pytest.raises(InvalidData, match="clip-2"):
        certify(config())
    change(folder, "queries", model="clip-1")
    outcome = certify(config(**QUICK))
    assert outcome.retriever.searcher.options.model == outcome.evaluation.encoder == "clip-1"


def test_seeds_and_files_that_cannot_be_used_are_refused(folder):
    with pytest.raises(InvalidConfig, match="seed"):
        config(seed=-1)
    with pytest.raises(DataUnavailable, match=r"none\.npz"):
        certify(config(queries="none.npz"))


def test_nothing_certified_ends_with_status_3(folder, capsys):
    shuffled = np.random.default_rng(0).permutation(ASKED_LABELS)
    change(folder, "queries", label=NAMES[shuffled])
    with pytest.raises(SystemExit) as stop:
        main([*COMMAND, "--depth", "2", "--alpha", "0.2", "--score_function", "constant"])
    assert stop.value.code == 3
    assert "Nothing is certified with probability 0.9" in capsys.readouterr().out


def test_items_tune_for_few_queries_and_labels_divide_on_request(folder):
    few = np.random.default_rng(5).permutation(600)[:60]
    write(folder, "few", ASKED[few], label=NAMES[ASKED_LABELS[few]])
    made = certify(config(queries="few.npz", score_function="quantile"))
    calibration = made.retriever.require_calibration()
    assert calibration.tuned_on_gallery
    assert (len(calibration.calibration_queries), made.evaluation.n_test) == (45, 15)
    by_label = certify(config(tuning="labels", output="by-label", score_function="quantile"))
    calibration = by_label.retriever.require_calibration()
    calibrated, tuned = (
        queries.population.labels
        for queries in (calibration.calibration_queries, calibration.tuning_queries)
    )
    assert not set(calibrated.tolist()) & set(tuned.tolist())
    assert "No test query has the label of a calibration query" in by_label.evaluation.labels
    write(folder, "clusters", ASKED, label=NAMES[ASKED_LABELS], cluster=np.arange(600) // 3)
    with pytest.raises(InvalidData, match="label"):
        certify(config(queries="clusters.npz", tuning="labels", output="neither"))


# Photographs of one moment in the gallery


@pytest.fixture
def bursts(folder):
    """A gallery in which every fifth item has a second photograph, with times and encounters."""
    rng = np.random.default_rng(3)
    vectors, labels = draw_vectors(400, 4)
    twins = np.arange(0, 400, 5)
    moments = np.r_[np.arange(400), twins]
    vectors = np.r_[vectors, vectors[twins] + 0.005 * rng.standard_normal((80, 6))]
    times = [f"2026-11-{1 + moment // 24:02d} {moment % 24:02d}:00:00" for moment in moments]
    times[400:] = [time[:-2] + "40" for time in times[400:]]
    columns = {"label": NAMES[labels[moments]], "encounter": [f"e{one}" for one in moments]}
    write(folder, "bursts", vectors.astype(np.float32), time=np.array(times), **columns)
    write(folder, "untimed", vectors.astype(np.float32), **columns)
    return moments


@pytest.mark.parametrize(
    ("name", "cluster", "kind"),
    [
        ("untimed", None, "moment"),
        ("bursts", None, "moment"),
        ("bursts", "encounter", "encounter"),
        ("bursts", "none", "item"),
    ],
)
def test_photographs_of_one_moment_count_once_unless_they_are_kept_apart(
    bursts, capsys, name, cluster, kind
):
    options = QUICK | {"queries": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = certify(config(gallery=f"{name}.npz", cluster=cluster, **options))
    assert any("burst" in str(one.message) for one in caught) == (kind == "item")
    searcher = outcome.retriever.searcher
    assert searcher.options.left_out == kind
    units = searcher.gallery.units
    assert (units[400:] == units[bursts[400:]]).all() == (kind != "item")
    n_units = len(np.unique(units))
    assert n_units >= (400 if kind != "moment" else 380)
    assert outcome.evaluation.n_calibration == pytest.approx(n_units / 2, abs=1)
    assert outcome.evaluation.n_test == pytest.approx(n_units / 4, abs=1)
    answer = outcome.retriever.guarantee(0.3, 0.1)
    assert answer.left_out == kind
    screen = capsys.readouterr().out
    assert f"480 in {n_units:,} " in screen or kind == "item"
    assert screen.count(" ~ ") == (3 if kind == "moment" else 0)  # examples


def test_clusters_and_times_that_cannot_be_read_are_refused(bursts, folder):
    with pytest.raises(InvalidData, match=r"encounters.*encounter"):
        certify(config(gallery="bursts.npz", queries=None, cluster="encounters"))
    times = np.array(["yesterday", *["2026-11-26"] * 299])
    change(folder, "gallery", time=times)
    with pytest.raises(InvalidData, match=r"time.*row 1\b"):
        certify(config(queries=None))
    certify(config(**QUICK))  # here nobody needs the times
    change(folder, "gallery", time=np.repeat("2026-11-26 08:00", 300))
    with pytest.raises(InvalidData, match="--cluster none"):  # each label is one moment
        certify(config(queries=None))
    change(folder, "gallery", time=np.repeat("2026-11-26", 300))
    assert certify(config(queries=None, **QUICK)).evaluation.n_calibration > 100  # only a day


@pytest.mark.parametrize("cluster", [None, "encounter"])
def test_items_that_are_added_join_the_moments_of_the_gallery(bursts, folder, cluster):
    with np.load(folder / "untimed.npz") as table:
        columns = dict(table)
    for name, rows in (("first", np.s_[:400]), ("later", np.s_[400:])):
        np.savez(folder / f"{name}.npz", **{key: values[rows] for key, values in columns.items()})
    certify(config(gallery="first.npz", queries=None, cluster=cluster, **QUICK))
    recalibrate(folder / "out" / "retriever", folder / "later.npz", None, None, None)
    units = rcir.load("out/retriever").searcher.gallery.units
    assert (units[400:] == units[bursts[400:]]).all()
    assert len(np.unique(units)) >= (400 if cluster else 380)


def test_queries_without_a_match_are_measured_as_the_retriever_answers(folder):
    """A third of the queries are of kinds that the gallery lacks, and lie apart from it."""
    strange = ASKED_LABELS % 3 == 0
    vectors = np.where(strange[:, None], 0.3 * ASKED + 1.0, ASKED)
    labels = np.where(strange, "unknown", NAMES[ASKED_LABELS])
    change(folder, "queries", vectors=vectors, label=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of queries of unknown kinds, which are alike
        outcome = certify(config(alphas=(0.3,)))
    written = json.loads((folder / "out" / "results.json").read_text())["open_set"]
    loaded, test = rcir.load(outcome.folder), outcome.splits.test
    unknown = test.n_relevant == 0
    assert written["n_test"] == unknown.sum()
    assert len(written["trade_off"]) > 3
    for row in written["trade_off"][::3]:
        request = {"alpha": row["alpha"], "delta": 0.1, "beta": row["beta"]}
        answers = loaded.retrieve(test.results.vectors, **request)
        sizes = np.array([answer.size for answer in answers])
        assert row["accepted"] == pytest.approx(np.mean(sizes[unknown] > 0))
        assert row["mean_size"] == pytest.approx(sizes[~unknown].mean())
        right = [
            name in answer.labels for name, answer in zip(labels_of(test), answers, strict=True)
        ]
        assert row["missed"] == pytest.approx(1 - np.mean(np.array(right)[~unknown]))
    assert outcome.evaluation.quality.numbers["auroc_unmatched"] > 0.8
    named = [row for row in outcome.evaluation.others if "with a match" in row.guarantee]
    assert [row.certified for row in named] == [True]


def labels_of(test):
    return [f"kind {label}" for label in test.population.labels]


def test_columns_of_keys_and_encounters_are_those_of_python(folder, capsys):
    sites = np.where(np.arange(600) % 3 == 0, "north", "south")
    visits = np.array([f"visit {row // 2}" for row in range(600)])
    change(folder, "gallery", site=np.resize(sites, 300))
    labels, keys = np.repeat(ASKED_LABELS[::2], 2), np.repeat(sites[::2], 2)
    change(folder, "queries", label=NAMES[labels], site=keys, visit=visits)
    options = ["--key", "site", "--encounter", "visit", "--output", "out", "--alpha", "0.5"]
    assert main([*COMMAND, *options]) == 0
    retriever = rcir.load("out/retriever")
    capsys.readouterr()
    asked = ["retrieve", "queries.npz", "--retriever", "out/retriever", "--alpha", "0.5"]
    assert main([*asked, "--encounter", "visit", "--json"]) == 0
    answers = retriever.retrieve(ASKED, 0.5, 0.1, key=keys.tolist(), together=visits.tolist())
    printed = json.loads(capsys.readouterr().out)
    assert [answer["ids"] for answer in printed] == [list(answer.ids) for answer in answers]
    assert len(answers) == 300
    assert main([*asked, "--key", "north", "--together", "--json"]) == 0
    alone = retriever.retrieve(ASKED, 0.5, 0.1, key="north", together=True)
    assert json.loads(capsys.readouterr().out)["ids"] == list(alone.ids)
    with pytest.raises(SystemExit):
        main([*COMMAND, "--key", "sight"])
    assert "sight" in capsys.readouterr().err
