"""Guarantees for the results of any search engine, from tables."""

import json

import numpy as np
import pandas as pd
import pytest

from rcir.cli import main
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.result_tables import CertifiedResults, ResultTable
from rcir.risk import make_request

DEPTH = 10


def results(n, seed=0, descending=False):
    """Return a table: the match of each query is at a random place, later for uncertain ones."""
    rng = np.random.default_rng(seed)
    first = rng.uniform(size=n)
    place = rng.binomial(8, first * 0.8)
    place[rng.uniform(size=n) < 0.02] = DEPTH  # not among the results
    rows = [
        (f"q{seed}-{q}", f"i{rank}", first[q] + 0.1 * rank, int(rank == place[q]))
        for q in range(n)
        for rank in range(DEPTH)
    ]
    table = pd.DataFrame(rows, columns=["query", "id", "distance", "relevant"])
    if descending:
        table["score"] = -table.pop("distance")
    return table.sample(frac=1, random_state=seed), dict(
        zip((row[0] for row in rows[::DEPTH]), place, strict=True)
    )


@pytest.mark.parametrize("descending", [False, True])
def test_the_sets_of_a_command_hold_what_is_guaranteed(descending, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results(2000, descending=descending)[0].to_parquet("table.parquet")
    new, places = results(2000, 1, descending)
    new.drop(columns="relevant").to_parquet("new.parquet")
    levels = ["--alpha", "0.01", "0.05", "0.1"]
    main(["certify", "--results", "table.parquet", "--output", "out", *levels])
    shown = capsys.readouterr().out
    assert "With probability at least 0.9" in shown
    assert "0.01  not certified" in shown
    with pytest.raises(InvalidConfig, match="rule"):
        CertifiedResults.load(tmp_path / "out")
    request = ["--alpha", "0.1", "--delta", "0.1", "--json"]
    main(["retrieve", "--results", "new.parquet", "--retriever", "out/rule", *request])
    sets = json.loads(capsys.readouterr().out)["sets"]
    missed = [f"i{place}" not in sets[name] for name, place in places.items()]
    assert np.mean(missed) < 0.1 + 3 * np.sqrt(0.09 / 2000)
    sizes = [len(ids) for ids in sets.values()]
    assert 1 < np.mean(sizes) < DEPTH
    assert all(len(set(ids)) == len(ids) for ids in sets.values())


@pytest.mark.statistical
def test_the_risk_exceeds_alpha_in_at_most_a_share_delta_of_calibrations(tmp_path):
    """With 60 queries, of which 30 calibrate; a rule fitted on all of them would exceed it more."""
    _, places = results(5000, 99)
    place = np.array(list(places.values()))
    alpha, delta, exceeded, n = 0.3, 0.2, 0, 100
    for seed in range(n):
        table, _ = results(60, 1000 + seed)
        table.to_csv(tmp_path / "t.csv", index=False)
        made = CertifiedResults.certify(
            ResultTable.read(tmp_path / "t.csv"), "constant", (alpha,), delta
        )
        size = 1 + int(made.rule.guarantee(make_request(alpha, delta)).threshold)
        exceeded += np.mean(place >= size) > alpha
    assert exceeded / n <= delta + 3 * np.sqrt(delta * (1 - delta) / n)


def test_labels_say_what_matches_as_a_column_of_matches_does(tmp_path):
    table, _ = results(50)
    table.to_csv(tmp_path / "relevant.csv", index=False)
    table["label"] = np.where(table.pop("relevant") == 1, "a", "b")
    table.assign(query_label="a").to_csv(tmp_path / "labels.csv", index=False)
    first, second = (ResultTable.read(tmp_path / f"{n}.csv") for n in ("relevant", "labels"))
    np.testing.assert_array_equal(first.relevant, second.relevant)
    assert first.ids[0].tolist() == [f"i{rank}" for rank in range(DEPTH)]
    table.assign(label=1, query_label="1").to_parquet(tmp_path / "mixed.parquet")
    with pytest.raises(InvalidData, match="texts"):
        ResultTable.read(tmp_path / "mixed.parquet")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.iloc[1:], "different depth"),
        (lambda t: pd.concat([t, t.iloc[:1]]), r"item i\d is 2 times .* query q0-\d+"),
        (lambda t: t.assign(distance=[np.nan, *t.distance[1:]]), "distance"),
        (lambda t: t.assign(score=1.0), "both columns"),
        (lambda t: t.drop(columns="distance"), "no column"),
        (lambda t: t.drop(columns="query"), "query"),
        (lambda t: t.assign(relevant=2), "0 or 1, and has 2"),
        (
            lambda t: t.assign(label=1, query_label=range(len(t))).drop(columns="relevant"),
            r"query q0-\d+ has two labels",
        ),
        (lambda t: t.assign(id=[None, *t.id[1:]]), "id"),
        (lambda t: t.iloc[:0], "no rows"),
    ],
)
def test_unsuitable_tables_are_refused(change, word, tmp_path):
    change(results(40)[0]).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InvalidData, match=word):
        ResultTable.read(tmp_path / "t.csv")


def test_the_refusal_is_that_of_the_largest_alpha(tmp_path):
    results(60)[0].to_csv(tmp_path / "t.csv", index=False)
    table, required = ResultTable.read(tmp_path / "t.csv"), []
    for alphas in ((0.05,), (0.01, 0.05), (0.05, 0.01)):
        with pytest.raises(RiskUnattainable) as refused:
            CertifiedResults.certify(table, "constant", alphas)
        required.append(refused.value.required_calibration)
    assert None not in required
    assert len(set(required)) == 1
    table.relevant[:] = False
    with pytest.raises(RiskUnattainable, match=r"100\.0% of them"):
        CertifiedResults.certify(table)


def test_lists_of_different_depth_are_cut_to_a_stated_one(tmp_path):
    table, _ = results(40)
    table[table["id"] != "i9"].to_csv(tmp_path / "t.csv", index=False)
    table.iloc[[*range(len(table) - 1)]].to_csv(tmp_path / "u.csv", index=False)
    assert ResultTable.read(tmp_path / "t.csv").results.depth == 9
    assert ResultTable.read(tmp_path / "u.csv", 5).results.depth == 5
    longer = pd.concat([table, table[:1].assign(id="j", distance=9.0)])
    longer.to_csv(tmp_path / "w.csv", index=False)
    assert ResultTable.read(tmp_path / "w.csv", 10).results.depth == 10
    table.drop(columns="relevant").to_csv(tmp_path / "v.csv", index=False)
    with pytest.raises(InvalidData, match="matches"):
        CertifiedResults.certify(ResultTable.read(tmp_path / "v.csv"))


def test_items_that_are_equally_far_are_ordered_by_their_ids(tmp_path):
    """Rows may be sorted by what matches, which future tables cannot be."""
    table = results(40)[0].assign(distance=1.0).sort_values("relevant", ascending=False)
    table.to_csv(tmp_path / "t.csv", index=False)
    read = ResultTable.read(tmp_path / "t.csv")
    assert read.ids.tolist() == [[f"i{rank}" for rank in range(DEPTH)]] * 40


def test_what_a_rule_of_results_does_not_limit_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results(400)[0].to_csv("distances.csv", index=False)
    results(9, 1, descending=True)[0].to_csv("scores.csv", index=False)
    for flags in (["--cluster", "video"], ["--queries", "q.csv"], ["--index", "hnsw"]):
        with pytest.raises(SystemExit):
            main(["certify", "--results", "distances.csv", *flags])
        assert flags[0].removeprefix("--") in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["certify", "--results", "distances.csv", "--output", "s3://bucket/x"])
    main(["certify", "--results", "distances.csv", "--output", "out"])
    cut = ["retrieve", "--retriever", "out/rule", "--alpha", "0.2", "--results"]
    for flags in (["--simultaneous"], ["--group", "x"], ["--max-size", "1"], ["--pairs", "p"]):
        with pytest.raises(SystemExit):
            main([*cut, "distances.csv", *flags])
    with pytest.raises(SystemExit):
        main([*cut, "distances.csv", "--alpha", "miss=0.2", "recall=0.5"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*cut, "scores.csv"])
    assert "column score" in capsys.readouterr().err
