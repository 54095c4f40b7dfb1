"""Searches and schedulers of sweeps, which train one trial at a time."""

import time

import pytest
import ray

from rcir.runs.folder import read_run
from rcir.runs.results import VALIDATION, RunResults
from tests.training.helpers import ON_RAY
from tuning import TuningConfig, sweep
from tuning.records import REPORTS_FILE
from tuning.trial import OBJECTIVE, read_reports

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster", "store"), *ON_RAY]


def test_tpe_draws_in_the_space_and_averages_over_seeds(small, certified, runs_in):
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}, "encoder.dim": {"uniform": [4, 8]}}
    config = TuningConfig(small("tpe", epochs=1), space, trials=3, seeds=2, alpha=0.2, search="tpe")
    records = sweep(config)
    trials = [*records.trials.values()]
    assert len({trial.values["optimizer.lr"] for trial in trials}) == 3
    for trial in trials:
        assert 1e-4 <= trial.values["optimizer.lr"] <= 1e-2
        assert trial.values["encoder.dim"] in (4, 5, 6, 7, 8)
        folders = [records.folder / trial.name, records.folder / f"{trial.name}-seed-1"]
        for seed, folder in enumerate(folders):
            stored = read_run(folder).config
            assert stored["seed"] == seed
            assert stored["optimizer"]["lr"] == trial.values["optimizer.lr"]
            assert stored["encoder"]["dim"] == trial.values["encoder.dim"]
        sizes = [certified(folder, 0.2, 0.1) for folder in folders]
        assert sizes[0] != sizes[1]
        assert trial.certified_size == pytest.approx(sum(sizes) / 2)
        recalls = [
            RunResults.read(folder / VALIDATION).metrics["recall_at_1"] for folder in folders
        ]
        assert trial.metrics["recall_at_1"] == pytest.approx(sum(recalls) / 2)
        assert (trial.state, trial.epochs) == ("finished", 2)
    assert runs_in(records.tracking_uri, records.mlflow_run).keys() == {
        f"trial-{number:03d}{seed}" for number in range(3) for seed in ("", "-seed-1")
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_asha_stops_a_trial_that_is_behind(small, runs_in, workers):
    """A trial with workers only waits for them, and leaves them when it is stopped."""
    space = {"optimizer.lr": {"grid": [3e-3, 1e-7]}}
    asha = {"scheduler": "asha", "interval": 2, "alpha": 0.2}
    training = small(f"asha-{workers}", epochs=3, num_workers=workers)
    records = sweep(TuningConfig(training, space, trials=1, **asha))
    ahead, behind = records.trials.values()
    assert (ahead.state, ahead.epochs) == ("finished", 3)
    assert (behind.state, behind.epochs) == ("stopped", 2)
    first, second = (
        next(report for report in reports["reports"] if report["epoch"] == 2)
        for reports in (
            read_reports(records.folder / trial.name / REPORTS_FILE) for trial in (ahead, behind)
        )
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
    until = time.monotonic() + 120
    while ray.available_resources().get("CPU") != 3:
        assert time.monotonic() < until, "the CPUs of the stopped trial are not free"
        time.sleep(0.2)
