"""`rcir index`: another index for a retriever in its folder, compared by its tuning queries."""

from functools import partial

import numpy as np
import pytest

import rcir
from calibration import reindex
from rcir.cli import main
from rcir.errors import InvalidData
from rcir.index import IndexConfig
from rcir.risk.selection import cross_fitted_sizes
from tests.vectors import draw_vectors

draw = partial(draw_vectors, classes=20, dim=8, noise=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("retrievers") / "exact"
    vectors, labels = draw(1500, 1)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=40)
    retriever.calibrate(*draw(700, 2), "quantile", seed=4)
    retriever.save(place)
    return place


def test_the_named_index_is_built_and_calibrated_through(folder, tmp_path):
    config = IndexConfig("ivf", {"nlist": 16, "nprobe": 2})
    choice = reindex(folder, config, tmp_path / "other")
    before, after = rcir.load(folder), rcir.load(choice.folder)
    assert IndexConfig.of(after.index).options["nprobe"] == 2
    assert after.changes() == []
    # The same vectors, calibrated through that index by the same queries, from nothing.
    vectors, labels = draw(1500, 1)
    fresh = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=40, index=config)
    fresh.calibrate(*draw(700, 2), "quantile", seed=4)
    asked, _ = draw(50, 3)
    sizes = [[a.size for a in one.retrieve(asked, 0.1, 0.1)] for one in (after, fresh)]
    assert sizes[0] == sizes[1]
    exact, named = choice.exact, choice.chosen
    truth = before.search(before.calibration.tuning_queries).positions
    found = after.search(before.calibration.tuning_queries).positions
    shared = [len(set(a) & set(b) - {-1}) for a, b in zip(truth, found, strict=True)]
    assert exact.recall == 1
    assert named.recall == pytest.approx(np.mean(shared) / 40)
    assert exact.memory == 4 * 8 * 1500


def test_exact_search_is_measured_once_and_sizes_that_are_not_certified_are_left_out(
    folder, tmp_path
):
    made = reindex(folder, IndexConfig("flat"), tmp_path / "other", alphas=[0.0005, 0.1])
    assert made.chosen is made.exact
    assert made.alphas == (0.0005, 0.1)
    before = rcir.load(folder)
    searched = before.search_labelled(before.calibration.tuning_queries)
    assert made.exact.sizes == cross_fitted_sizes(searched, "quantile", (0.1,), 0.1)


def test_sizes_of_a_label_model_are_those_of_the_tuning_queries(tmp_path):
    vectors, labels = draw(1500, 1, noise=1.5)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=40)
    retriever.calibrate(*draw(700, 2, noise=1.5), tuning="queries", seed=4)
    assert retriever.calibration.miss_rule.score_function.name == "label-model"
    retriever.save(tmp_path / "exact")
    made = reindex(tmp_path / "exact", IndexConfig("hnsw"), tmp_path / "other", alphas=[0.1])
    # As if these queries had calibrated, with the same model of the gallery's labels.
    tuning = retriever.calibration.tuning_queries
    fresh = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=40)
    fresh.calibrate(tuning.vectors, tuning.relevance.labels, tuning="gallery")
    sizes = [answer.size for answer in fresh.retrieve(tuning.vectors, 0.1, 0.1)]
    assert np.std(sizes) > 0.5
    assert made.exact.sizes == {0.1: pytest.approx(np.mean(sizes))}


def test_codes_are_no_vectors_to_build_another_index_of(folder, tmp_path):
    options = {"nlist": 8, "nprobe": 8, "m": 4, "nbits": 6, "exact": False}
    for config in (
        IndexConfig("ivf-pq", options),
        IndexConfig("factory", {"factory": "IVF8,SQ8", "search": "nprobe=8"}),
    ):
        coded = reindex(folder, config, tmp_path / "coded").folder
        with pytest.raises(InvalidData, match="codes of the vectors"):
            reindex(coded, IndexConfig("flat"), tmp_path / "flat")
    for config in (
        IndexConfig("ivf-pq", options | {"exact": True}),
        IndexConfig("factory", {"factory": "HNSW16,SQfp16"}),
    ):
        kept = reindex(folder, config, tmp_path / "kept").folder
        reindex(kept, IndexConfig("flat"), tmp_path / "flat")


def test_the_command_prints_and_replaces(folder, tmp_path, capsys):
    given = ["index", str(folder), "--output", str(tmp_path / "other"), "--index", "ivf-pq"]
    options = ["nlist=8", "nprobe=8", "m=4", "nbits=6"]
    main([*given, *(part for one in options for part in ("--index-option", one))])
    printed = capsys.readouterr().out
    assert "ivf-pq nlist=8 nprobe=8 m=4 nbits=6 " in printed
    assert "700" not in printed
    assert "210 tuning queries" in printed
    main(["index", str(tmp_path / "other"), "--index", "flat"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("flat ")]) == 1
    assert IndexConfig.of(rcir.load(tmp_path / "other").index).kind == "flat"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--index-option", "nlist=3"], "required: --index"),
        (["--index", "flat", "--index-option", "nlist=3"], "nlist"),
        (["--index", "ivf", "--index-option", "nlist"], "NAME=VALUE"),
        (["--index", "hnsw", "--index_option", "nprobe=3"], "no option nprobe"),
        (["--index", "round"], "'round'"),
    ],
)
def test_invalid_options_of_the_command_are_refused(folder, capsys, options, word):
    with pytest.raises(SystemExit):
        main(["index", str(folder), *options])
    assert word in capsys.readouterr().err


def test_too_few_tuning_queries_are_refused(tmp_path):
    vectors, labels = draw(300, 1)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=20)
    retriever.calibrate(*draw(12, 2), "constant", tuning="queries")
    retriever.save(tmp_path / "few")
    with pytest.raises(InvalidData, match="3 tuning queries"):
        reindex(tmp_path / "few", IndexConfig("ivf"))
