"""Running statistics of batch normalisation, and what two processes tell each other."""

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import batch_norm

from training.batch_norm import GhostBatchStatistics
from training.workers import Workers

ALONE = Workers(0, 1, torch.device("cpu"))
STEPS = 3

# One of two processes; it takes the steps of `train` below, and then prints what it received.
WORKER = """
import json, sys
import torch
from safetensors.torch import save_file
from training.batch_norm import GhostBatchStatistics
from training.workers import Workers

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
)
workers = Workers(rank, 2, torch.device("cpu"))
network, images = (torch.load(f"{folder}/{name}", weights_only=False) for name in ("net", "in"))
statistics = GhostBatchStatistics(network, workers)
for batch in images:
    for part in range(rank, 3, 2):
        statistics.start_part()
        network(batch[part::3])
    statistics.finish()
save_file(network.state_dict(), f"{folder}/{rank}.safetensors")

rows = torch.arange(6).view(3, 2) + 10 * rank
received = {
    "unequal": workers.all_gather(rows[: 3 - 2 * rank]),
    "first has none": workers.all_gather(rows[: 3 * rank]),
    "last has none": workers.all_gather(rows[: 3 - 3 * rank]),
    "nobody has any": workers.all_gather(rows[:0]),
    "numbers": workers.all_gather(torch.tensor([0.5, -1.5])[: rank + 1]),
    "summed": workers.all_reduce(rows),
    "own": rows,  # left as it was
}
received = {
    name: [list(values.shape), values.flatten().tolist()] for name, values in received.items()
}
received["metrics"] = workers.broadcast({"recall": 0.25} if rank == 0 else None)
received["shares"] = [list(workers.shard(n)) for n in (0, 1, 5)]
print(json.dumps(received))
torch.distributed.destroy_process_group()
"""


def network():
    """Two layers of batch normalisation, of different momentum, that have seen something."""
    torch.manual_seed(3)
    built = nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3)),
    )
    for layer in (built[1], built[4]):
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
        layer.num_batches_tracked += 7
    return built


def batches():
    """Eleven images each: parts of four, four and three."""
    return torch.randn(STEPS, 11, 2, 5, 5, generator=torch.Generator().manual_seed(4))


def train(net, images, n_micro_batches):
    """The running statistics after some steps in this process; yields the output of each part."""
    statistics = GhostBatchStatistics(net, ALONE)
    for batch in images:
        for part in range(n_micro_batches):
            statistics.start_part()
            yield net(batch[part::n_micro_batches])
        statistics.finish()


def naive(net, images, n_micro_batches):
    """(mean, variance) of each layer, and the outputs, by the definition."""
    first, layers = net[0], (net[1], net[4])
    momenta = (0.1, 0.3)
    running = [[layer.running_mean.clone(), layer.running_var.clone()] for layer in layers]
    outputs = []
    for batch in images:
        found = [[], []]
        for part in range(n_micro_batches):
            values = first(batch[part::n_micro_batches])
            for i, layer in enumerate(layers):
                flat = values.transpose(0, 1).flatten(1)
                found[i].append((flat.mean(1), flat.var(1, correction=1)))
                values = batch_norm(values, None, None, layer.weight, layer.bias, training=True)
                values = net[3](values.relu()) if i == 0 else values
            outputs.append(values)
        for i, momentum in enumerate(momenta):
            for k in (0, 1):
                mean = torch.stack([each[k] for each in found[i]]).mean(0)
                running[i][k] = (1 - momentum) * running[i][k] + momentum * mean
    return running, outputs


@pytest.mark.parametrize("n_micro_batches", [1, 2, 3])
def test_a_step_moves_them_towards_the_mean_over_the_parts(n_micro_batches):
    net = network()
    expected, outputs = naive(copy.deepcopy(net), batches(), n_micro_batches)
    found = list(train(net, batches(), n_micro_batches))
    for ours, theirs in zip(found, outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    for layer, momentum, (mean, variance) in zip(
        (net[1], net[4]), (0.1, 0.3), expected, strict=True
    ):
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, variance)
        assert layer.num_batches_tracked == 7 + STEPS
        assert layer.momentum == momentum


def test_of_one_part_they_are_torchs_own():
    ours, theirs = network(), network()
    list(train(ours, batches(), n_micro_batches=1))
    for batch in batches():
        theirs(batch)
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values, rtol=1e-6, atol=1e-7)


def test_between_steps_the_layers_hold_them_under_the_names_of_checkpoints():
    net = network()
    buffers = {name: values.data_ptr() for name, values in net.named_buffers()}
    before = {name: values.clone() for name, values in net.state_dict().items()}
    list(train(net, batches(), n_micro_batches=2))
    assert {name: values.data_ptr() for name, values in net.named_buffers()} == buffers
    assert not torch.equal(net.state_dict()["1.running_mean"], before["1.running_mean"])


def test_a_network_without_such_layers_is_left_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    statistics = GhostBatchStatistics(net, ALONE)
    statistics.start_part()
    net(torch.randn(3, 2))
    statistics.finish()
    assert net[1].running_mean is None


def test_a_pretrained_backbone_keeps_its_statistics_and_is_normalised_by_them():
    net = network()
    before = copy.deepcopy(net).eval()
    statistics = GhostBatchStatistics(net, ALONE, pretrained=True)
    statistics.train()
    assert net.training
    for batch in batches():
        statistics.start_part()
        torch.testing.assert_close(net(batch), before(batch))
        statistics.finish()
    for name, values in before.state_dict().items():
        assert torch.equal(net.state_dict()[name], values)
    GhostBatchStatistics(net, ALONE).train()
    assert net[1].training


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The folder of two processes that met, and what each of them received."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "worker.py").write_text(WORKER)
    torch.save(network(), folder / "net")
    torch.save(batches(), folder / "in")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "worker.py", str(rank), str(folder)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return folder, [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_hold_what_one_would(processes):
    alone = network()
    list(train(alone, batches(), n_micro_batches=3))
    for rank in (0, 1):  # of parts 0 and 2, and of part 1
        found = load_file(processes[0] / f"{rank}.safetensors")
        assert found.keys() == alone.state_dict().keys()
        for name, values in alone.state_dict().items():
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_two_processes_tell_each_other(processes):
    first, second = np.arange(6).reshape(3, 2), np.arange(6).reshape(3, 2) + 10
    expected = {
        "unequal": np.concatenate([first, second[:1]]),
        "first has none": second,
        "last has none": first,
        "nobody has any": first[:0],
        "numbers": np.array([0.5, 0.5, -1.5]),
        "summed": first + second,
    }
    for rank, received in enumerate(processes[1]):
        for name, values in (expected | {"own": (first, second)[rank]}).items():
            assert received[name] == [list(values.shape), values.flatten().tolist()], name
        assert received["metrics"] == {"recall": 0.25}
    shares = zip(*(received["shares"] for received in processes[1]), strict=True)
    assert [ours + theirs for ours, theirs in shares] == [[], [0], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_runs_by_rank_of_about_one_length(count):
    for n in (0, 1, 6, 7, 8, 100):
        shares = [Workers(rank, count, torch.device("cpu")).shard(n) for rank in range(count)]
        assert [number for share in shares for number in share] == list(range(n))
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
