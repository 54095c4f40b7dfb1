"""`rcir verify`: the pairs to score, and the certificate of their scores."""

import json

import numpy as np
import pytest

from rcir.cli import main
from rcir.data.vector_files import read_scores
from tests.vectors import draw_vectors


@pytest.mark.usefixtures("no_figures")
def test_pairs_are_written_scored_and_certified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    labels = {}
    for name, n, seed in (("gallery", 300, 1), ("queries", 600, 2)):
        vectors, kinds = draw_vectors(n, seed)
        ids = [f"{name}/{row}" for row in range(n)]
        labels |= dict(zip(ids, kinds.tolist(), strict=True))
        np.savez(f"{name}.npz", vector=vectors, id=np.array(ids), label=kinds)
    files = ["gallery.npz", "--queries", "queries.npz"]
    assert main(["certify", *files, "--alpha", "0.3", "--output", "out"]) == 0
    command = ["verify", "--retriever", "out/retriever", *files[1:], "--depth", "5"]
    main([*command, "--pairs", "pairs.txt"])
    pairs = [line.split() for line in (tmp_path / "pairs.txt").read_text().splitlines()]
    assert len(pairs) == len({query for query, _ in pairs}) * 5
    rows = [f"{query},{item},{labels[query] == labels[item]:d}" for query, item in pairs]
    (tmp_path / "scores.csv").write_text("\n".join(["query,item,score", *rows]))
    assert len(read_scores(tmp_path / "scores.csv")) == len(pairs)
    capsys.readouterr()
    main([*command, "--scores", "scores.csv", "--alpha", "0.3", "--output", "verified.json"])
    shown = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "verified.json").read_text())
    assert "of the queries that have a match at most 0.3 end without it" in shown
    assert (written["alpha"], written["wrong"], written["depth"]) == (0.3, 0.05, 5)
    assert 1 <= written["mean_verified"] <= written["fixed"] <= 5
    options = ["--retriever", "out/retriever", "--alpha", "0.3", "--pairs", "sets.txt", "--json"]
    main(["retrieve", "queries.npz", *options])
    sets = json.loads(capsys.readouterr().out)
    lines = (tmp_path / "sets.txt").read_text().splitlines()
    assert lines == [f"queries/{n} {item}" for n, each in enumerate(sets) for item in each["ids"]]
    with pytest.raises(SystemExit):
        main(command)
    assert "--scores or --images" in capsys.readouterr().err
