"""Records of a sweep: written, read again, ranked and shown; and the resources of trials."""

import json
from dataclasses import replace

import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.runs.folder import RunFolder
from training import TrainingConfig
from tuning import Records, Trial, TuningConfig
from tuning.records import read_records
from tuning.run import count_parallel_trials, find_resources

SPACE = {"optimizer.lr": {"choice": [1e-3, 1e-4]}}
ON_GPU = {"use_gpu": True}
PLAIN = {"space": SPACE, "alpha": 0.1, "delta": 0.1, "seeds": 2, "final_seeds": 3}


def trial(number, size, recall=0.5, state="finished", **others):
    metrics = {"certified_size": size, "recall_at_1": recall}
    return Trial(number, {"optimizer.lr": 1e-3}, state, 2, metrics, **others)


@pytest.fixture
def records(tmp_path):
    trials = [
        trial(0, 9.0),
        trial(1, 1.0, state="stopped"),
        trial(2, 7.0, recall=0.4),
        Trial(3, {"optimizer.lr": 1e-4}, "failed", reason="TrainingDiverged: nan", final=True),
        trial(4, 7.0, recall=0.6),
        trial(5, 7.0, recall=0.6),
        trial(6, 0.5, state="failed", reason="its process died"),
        Trial(7, {"optimizer.lr": 1e-4}),
        Trial(8, {"optimizer.lr": 1e-4}, "finished", 2, {"recall_at_1": 0.9}),  # not certified
    ]
    by_number = {each.number: each for each in trials}
    return Records(tmp_path, PLAIN, "id", "sqlite:///mlflow.db", by_number)


def test_only_trials_that_finished_are_ranked_by_size_then_recall(records):
    order = [each.number for each in records.ranked()]
    assert order[:5] == [4, 5, 2, 0, 8]
    assert {*order[5:]} == {1, 3, 6, 7}


def test_finalists_are_ranked_before_others(records):
    records.trials[0] = replace(records.trials[0], confirmed=True)
    assert [each.number for each in records.ranked()][:4] == [0, 4, 5, 2]
    assert records.names(records.trials[0]) == ["trial-000", "trial-000-seed-1", "trial-000-seed-2"]
    assert records.names(records.trials[4]) == ["trial-004", "trial-004-seed-1"]


def test_records_are_read_as_they_were_written(records):
    records.finished = True
    records.write()
    assert read_records(records.folder) == records
    # What other tools read.
    stored = json.loads((records.folder / "sweep.json").read_text())
    assert (stored["config"]["alpha"], stored["config"]["delta"]) == (0.1, 0.1)
    assert stored["trials"][1].pop("folders") == ["trial-001", "trial-001-seed-1"]
    (records.folder / "sweep.json").write_text(json.dumps(stored | {"later": 1}))
    assert read_records(records.folder) == records


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"trials": [{"numbre": 3}]}'])
def test_a_damaged_file_is_named(tmp_path, content):
    assert read_records(tmp_path) is None
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(InvalidData, match=r"sweep\.json"):
        read_records(tmp_path)


def test_a_failed_trial_is_tried_again_unless_it_would_fail_again(records):
    done = {each.number for each in records.trials.values() if each.done}
    assert done == {0, 1, 2, 3, 4, 5, 8}


def test_the_best_is_a_run_that_finished(records):
    run = RunFolder(records.folder / "trial-004", {}, "id", "uri", finished=True)
    run.path.mkdir()
    run.write()
    assert records.best_run().path == run.path
    records.trials = {number: records.trials[number] for number in (1, 3)}
    with pytest.raises(InvalidData, match="TrainingDiverged"):
        records.best_run()


@pytest.fixture
def sweep_on(monkeypatch):
    """`sweep_on(nodes, training, share)`: a sweep, on a cluster of nodes; another one is gone."""

    def configured(nodes, training, share):
        total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
        gone = {"Alive": False, "Resources": {"CPU": 64, "GPU": 8}}
        alive = [{"Alive": True, "Resources": node} for node in nodes]
        monkeypatch.setattr("ray.cluster_resources", lambda: total)
        monkeypatch.setattr("ray.nodes", lambda: [gone, *alive])
        return TuningConfig(TrainingConfig("sweep", **training), SPACE, gpus_per_trial=share)

    return configured


@pytest.mark.parametrize(
    ("training", "share", "nodes", "held", "at_once"),
    [
        ({"threads": 2}, 1.0, [{"CPU": 5}, {"CPU": 3}], {"CPU": 2}, 3),
        ({"num_workers": 2}, 1.0, [{"CPU": 5}], {"memory": 1}, 2),
        # Workers may lie on several nodes.
        ({"num_workers": (1, 4)}, 1.0, [{"CPU": 3}, {"CPU": 5}], {"memory": 1}, 2),
        ({"use_gpu": True, "num_workers": 2}, 1.0, [{"CPU": 8, "GPU": 5}], {"memory": 1}, 2),
        (ON_GPU, 1.0, [{"CPU": 8, "GPU": 2}], {"CPU": 4, "GPU": 1}, 2),
        # Two on each GPU: 0.4 of one and 0.1 of two others are no share of any.
        (ON_GPU, 0.4, [{"CPU": 8, "GPU": 3}], {"CPU": 1, "GPU": 0.4}, 6),
        (ON_GPU, 0.1, [{"CPU": 2, "GPU": 1}], {"CPU": 1, "GPU": 0.1}, 2),
        # The node without a GPU is of no use.
        (ON_GPU, 0.5, [{"CPU": 4, "GPU": 1}, {"CPU": 8}], {"CPU": 2, "GPU": 0.5}, 2),
    ],
)
def test_trials_never_hold_more_than_the_cluster_has(
    sweep_on, training, share, nodes, held, at_once
):
    config = sweep_on(nodes, training, share)
    assert find_resources(config) == held
    assert count_parallel_trials(config) == at_once


@pytest.mark.parametrize(
    ("training", "share", "nodes", "message"),
    [
        (ON_GPU, 0.5, [{"CPU": 8}], r"no GPU"),
        # No node has as many as one trial takes.
        ({"threads": 4}, 1.0, [{"CPU": 3}, {"CPU": 3}], "4 CPUs"),
        ({"num_workers": 4}, 1.0, [{"CPU": 3}], "4 CPUs"),
    ],
)
def test_a_trial_that_no_node_can_hold_is_refused(sweep_on, training, share, nodes, message):
    with pytest.raises(InvalidConfig, match=message):
        count_parallel_trials(sweep_on(nodes, training, share))
