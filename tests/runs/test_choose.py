"""`rcir compare --choose`: the best of several calibrated retrievers, certified at delta / k."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

import rcir
from calibration import EvaluationConfig, evaluate_retriever
from rcir.data import DataConfig, load_splits
from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.rules import RuleKind, Rules
from rcir.runs.compare import CHOSEN_BY_LOOKING
from rcir.runs.results import TEST, RunResults

ALPHA, DELTA = 0.3, 0.1
LEVELS = ("--alpha", "0.3", "0.4")


@pytest.fixture
def choose(compare):
    return lambda *folders: compare.json("--choose", *folders, *LEVELS)


def chosen_among(folders):
    return [Retriever.load(folder / "retriever").calibration.chosen_among for folder in folders]


def size_by_scipy(folder, among):
    """The mean size on the test queries, with misses counted by SciPy's binomial distribution."""
    (part,) = RunResults.read(folder / TEST).parts
    n = len(part.scores)
    allowed = np.count_nonzero(binom.cdf(np.arange(n), n, ALPHA) <= DELTA / among) - 1
    threshold = np.sort(part.scores)[::-1][allowed]
    # Candidates within the tolerance of the threshold are in the set.
    return np.mean(np.sum(part.candidate_scores <= threshold * (1 + 1e-3), axis=1))


def test_the_smallest_sets_at_delta_over_k_are_chosen_and_marked(copies, choose):
    sizes = [size_by_scipy(folder, 3) for folder in copies]
    comparison = choose(*copies)
    choice, best = comparison["choice"], copies[int(np.argmin(sizes))]
    assert comparison["delta"] == pytest.approx(DELTA / 3)
    assert [run["sizes"]["0.3"]["value"] for run in comparison["runs"]] == pytest.approx(sizes)
    assert (choice["run"], choice["retriever"]) == (best.name, str(best / "retriever"))
    assert choice["mean_size"] == pytest.approx(min(sizes))
    assert (choice["guarantee"]["chosen_among"], choice["guarantee"]["delta"]) == (3, DELTA)
    assert chosen_among(copies) == [3 if folder == best else 1 for folder in copies]


def test_the_chosen_one_answers_at_delta_over_k_and_states_it(
    copies, splits, compare, tmp_path, no_figures
):
    screen = compare.screen("--choose", *copies, *LEVELS)
    (folder,) = (folder for folder in copies if chosen_among([folder]) == [3])
    retriever = Retriever.load(folder / "retriever")
    answer = retriever.retrieve(splits.test.images[0], ALPHA, DELTA)
    assert "Chosen among 3" in str(answer.guarantee)
    assert str(answer.guarantee) in screen
    assert "copies made before are not" in screen  # there is none in MLflow
    assert CHOSEN_BY_LOOKING not in screen
    retriever.calibration = replace(retriever.calibration, chosen_among=1)
    alone = retriever.retrieve(splits.test.images[0], ALPHA, DELTA / 3)
    assert alone.ids == answer.ids
    assert alone.guarantee.threshold == answer.guarantee.threshold
    assert (alone.guarantee.delta, answer.guarantee.delta) == (DELTA / 3, DELTA)
    # An evaluation measures the sets that it returns.
    config = EvaluationConfig(str(folder / "retriever"), str(tmp_path / "again"), (ALPHA,), DELTA)
    (row,) = evaluate_retriever(config).evaluation.rows
    assert row.mean_size == pytest.approx(size_by_scipy(folder, 3), rel=0.01)
    assert row.delta == pytest.approx(DELTA / 3)


def test_the_copy_in_mlflow_is_marked_too(tracked_copies, choose):
    assert choose(*tracked_copies)["choice"]["marked_in_mlflow"]
    (folder,) = (folder for folder in tracked_copies if chosen_among([folder]) == [2])
    run = Retriever.load(folder / "retriever").origin["calibration"]
    assert rcir.load(f"runs:/{run}/retriever").calibration.chosen_among == 2


def test_one_that_was_chosen_before_counts_as_all_of_its_contenders(copies, choose):
    """Chosen among 2, among 5, and not chosen: 8 certificates hold together."""
    for folder, among in zip(copies, (2, 5, 1), strict=True):
        retriever = Retriever.load(folder / "retriever")
        retriever.calibration = replace(retriever.calibration, chosen_among=among)
        retriever.save(folder / "retriever")
    choice = choose(*copies)["choice"]
    assert choice["guarantee"]["chosen_among"] == 8
    sizes = [size_by_scipy(folder, 8) for folder in copies]
    assert choice["mean_size"] == pytest.approx(min(sizes))


def test_a_comparison_without_a_choice_warns_and_marks_nothing(copies, compare):
    assert CHOSEN_BY_LOOKING in compare.screen(*copies, *LEVELS)
    assert CHOSEN_BY_LOOKING not in compare.screen(copies[0], *LEVELS)
    assert chosen_among(copies) == [1, 1, 1]


def test_an_invalid_choice_is_refused_and_marks_nothing(copies, trained, compare):
    one, two, three = copies

    def refused(*folders, alphas=("0.3",)):
        return compare.refused("--choose", *folders, "--alpha", *alphas)

    assert "two or more" in refused(one)
    assert "each named once" in refused(one, two, one)
    assert "no calibrated retriever" in refused(one, trained.path)
    assert "alpha is 2.0" in refused(one, two, alphas=["2"])
    assert "request alpha >= " in refused(one, two, alphas=["0.001", "0.3"])
    measured = RunResults.read(two / TEST)
    replace(measured, queries="others").write(two / TEST)
    assert "queries differ" in refused(one, two)
    shutil.copy(one / TEST, two / TEST)
    assert "calibrate again" in refused(one, two)
    retriever = Retriever.load(three / "retriever")
    main = replace(retriever.calibration.miss_rule, bound="hoeffding")
    rules = {**retriever.calibration.rules, RuleKind(): Rules({"miss": main})}
    retriever.calibration = replace(retriever.calibration, rules=rules)
    retriever.save(three / "retriever")
    assert "--bound binomial" in refused(one, three)
    extended = Retriever.load(one / "retriever")
    test_queries = load_splits(DataConfig(**extended.origin["data"])).test
    extended.extend_calibration(extended.search_labelled(test_queries), recurring=True)
    extended.save(one / "retriever")
    assert "were added" in refused(one, three)
    assert chosen_among(copies) == [1, 1, 1]


def test_the_mark_is_saved_and_stays_with_the_queries(folder, splits):
    retriever = Retriever.load(folder)
    retriever.calibration = replace(retriever.calibration, chosen_among=12)
    loaded = Retriever.load(retriever.save(folder))
    assert loaded.calibration.chosen_among == 12
    with pytest.raises(InvalidConfig, match="12"):
        loaded.retrieve(splits.test.images[0], 0.5, None)
    with pytest.raises(RiskUnattainable, match="12"):
        loaded.retrieve(splits.test.images[0], 0.001, 0.1)
    loaded.calibrate_splits(
        loaded.search_labelled(splits.tuning),
        loaded.search_labelled(splits.calibration),
        "constant",
    )
    assert loaded.calibration.chosen_among == 12
    others = [splits.test.subset(np.arange(start, len(splits.test), 2)) for start in (0, 1)]
    loaded.calibrate_splits(*map(loaded.search_labelled, others), "constant")
    assert loaded.calibration.chosen_among == 1
