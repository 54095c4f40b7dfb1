"""Searches and schedulers, on a machine that trains one trial at a time."""

import time

import pytest
import ray
from safetensors.numpy import load_file

from rcir.config import from_plain, parse
from rcir.runs.folder import read_run
from rcir.runs.results import VALIDATION, RunResults
from training import TrainingConfig, train
from tuning import TuningConfig, sweep
from tuning.records import REPORTS_FILE
from tuning.trial import OBJECTIVE, read_reports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]

SPACE = {
    "optimizer.lr": {"loguniform": [1e-7, 1e-2]},
    "mining.margin": {"uniform": [0.05, 0.2]},
    "mining.negatives": {"choice": ["semi-hard", "margin-violating", "hardest"]},
}


@pytest.fixture(scope="module")
def searched(one_cpu, store, small):
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}, "encoder.dim": {"uniform": [4, 8]}}
    both = {"search": "tpe", "objectives": ("certified_size", "recall_at_1")}
    return sweep(TuningConfig(small("tpe", epochs=1), space, trials=3, seeds=2, alpha=0.2, **both))


def test_tpe_draws_in_the_space(searched):
    drawn = [trial.values for trial in searched.trials.values()]
    assert len({values["optimizer.lr"] for values in drawn}) == 3
    for values in drawn:
        assert 1e-4 <= values["optimizer.lr"] <= 1e-2
        assert values["encoder.dim"] in (4, 5, 6, 7, 8)
    for number, values in enumerate(drawn):
        found = read_run(searched.folder / f"trial-{number:03d}").config
        assert found["optimizer"]["lr"] == values["optimizer.lr"]
        assert found["encoder"]["dim"] == values["encoder.dim"]


def test_the_objective_of_several_seeds_is_their_mean(searched, certified):
    for trial in searched.trials.values():
        runs = [searched.folder / trial.name, searched.folder / f"{trial.name}-seed-1"]
        assert [read_run(run).config["seed"] for run in runs] == [0, 1]
        sizes = [certified(run, 0.2, 0.1) for run in runs]
        assert sizes[0] != sizes[1]
        assert trial.certified_size == pytest.approx(sum(sizes) / 2)
        recalls = [RunResults.read(run / VALIDATION).metrics["recall_at_1"] for run in runs]
        assert trial.metrics["recall_at_1"] == pytest.approx(sum(recalls) / 2)
        assert (trial.state, trial.epochs) == ("finished", 2)


def test_seeds_are_runs_of_their_own_below_the_sweep(searched, store, runs_in):
    runs = runs_in(store, searched.mlflow_run)
    expected = {f"trial-{number:03d}{seed}" for number in range(3) for seed in ("", "-seed-1")}
    assert runs.keys() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_asha_stops_who_is_behind(one_cpu, small, runs_in, workers):
    """A trial with workers only waits for them, and leaves them when it is stopped."""
    space = {"optimizer.lr": {"grid": [3e-3, 1e-7]}}
    asha = {"scheduler": "asha", "interval": 2, "alpha": 0.2}
    training = small(f"asha-{workers}", epochs=3, num_workers=workers)
    records = sweep(TuningConfig(training, space, trials=1, **asha))
    ahead, behind = records.trials.values()
    assert (ahead.state, ahead.epochs) == ("finished", 3)
    assert (behind.state, behind.epochs) == ("stopped", 2)
    then = [read_reports(records.folder / trial.name / REPORTS_FILE) for trial in (ahead, behind)]
    first, second = (
        next(report for report in each["reports"] if report["epoch"] == 2) for each in then
    )
    assert second[OBJECTIVE] > first[OBJECTIVE]
    assert not (records.folder / behind.name / "encoder.safetensors").exists()
    assert records.ranked() == [ahead, behind]
    runs = runs_in(records.tracking_uri, records.mlflow_run)
    assert {name: run.info.status for name, run in runs.items()} == {
        ahead.name: "FINISHED",
        behind.name: "KILLED",
    }
    assert runs[behind.name].data.tags["rcir.state"] == "stopped"
    until = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 1:
        assert time.monotonic() < until, "the CPU of the stopped trial is not free"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def population(one_cpu, store, small):
    pbt = {"scheduler": "pbt", "interval": 1, "alpha": 0.2}
    return sweep(TuningConfig(small("pbt", epochs=4), SPACE, trials=3, **pbt))


def test_members_of_a_population_go_on_from_others_with_other_options(population):
    runs = [read_run(population.folder / trial.name) for trial in population.trials.values()]
    changed = [run for run in runs if run.config["changes"]]
    assert 1 <= len(changed) < 3  # who is ahead goes on as it is
    for run in changed:
        (*_, last) = run.config["changes"]
        assert last["epoch"] in (2, 3, 4)
        assert last["options"].keys() == SPACE.keys()
        (trial,) = [one for one in population.trials.values() if one.name == run.path.name]
        assert trial.values == last["options"]


def test_options_stay_in_the_space(population):
    runs = [read_run(population.folder / trial.name) for trial in population.trials.values()]
    found = [trial.values for trial in population.trials.values()]
    found += [change["options"] for run in runs for change in run.config["changes"]]
    for values in found:
        assert 1e-7 <= values["optimizer.lr"] <= 1e-2
        assert 0.05 <= values["mining.margin"] <= 0.2
        assert values["mining.negatives"] in ("semi-hard", "margin-violating", "hardest")


def test_what_a_member_came_to_can_be_trained_from_the_start(population):
    """Of the best, which may have gone its own way, and of one that went on from another."""
    folder = population.folder
    (changed, *_) = [
        trial for trial in population.trials.values() if changes_of(folder / trial.name)
    ]
    config = read_run(folder / changed.name).config
    again = from_plain(TrainingConfig, config | {"name": "again", "storage": str(folder)})
    best = parse(TrainingConfig, ["--config", str(folder / "best.yaml")], "prog", "")
    assert_same(train(best).path, folder / population.ranked()[0].name)
    assert_same(train(again).path, folder / changed.name)


def changes_of(folder):
    return read_run(folder).config["changes"]


def assert_same(one, other):
    """The measurements of two runs, and the weights that they ended with."""
    found, expected = RunResults.read(one / VALIDATION), RunResults.read(other / VALIDATION)
    assert found.metrics == expected.metrics
    last = "checkpoints/epoch-0004/model.safetensors"
    ours, theirs = load_file(one / last), load_file(other / last)
    assert all((ours[name] == values).all() for name, values in theirs.items())
