"""Running statistics of batch normalisation, and what two processes exchange."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

from tests.training.helpers import ALONE, equal
from training.trainer import GhostBatchStatistics, freeze_affine
from training.workers import Workers

STEPS = 3


def network():
    """Two layers of batch normalisation, of different momentum, that have seen something."""
    torch.manual_seed(3)
    built = nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3)),
    ).double()
    for layer in (built[1], built[4]):
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
        layer.num_batches_tracked += 7
    return built


def batches():
    """Eleven images each: parts of four, four and three."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(STEPS, 11, 2, 5, 5, generator=generator, dtype=torch.float64)


def train(net, images, n_micro_batches):
    """Take some steps in this process; return the output of each part."""
    statistics, outputs = GhostBatchStatistics(net, ALONE), []
    for batch in images:
        for part in range(n_micro_batches):
            statistics.start_part()
            outputs.append(net(batch[part::n_micro_batches]))
        statistics.finish()
    return outputs


def naive(net, images, n_micro_batches):
    """(mean, variance) of each layer, and the outputs, by the definition."""
    first, layers = net[0], (net[1], net[4])
    momenta = (0.1, 0.3)
    running = [[layer.running_mean.clone(), layer.running_var.clone()] for layer in layers]
    outputs = []
    for batch in images:
        moments = [[], []]
        for part in range(n_micro_batches):
            values = first(batch[part::n_micro_batches])
            for i, layer in enumerate(layers):
                flat = values.transpose(0, 1).flatten(1)
                moments[i].append((flat.mean(1), flat.var(1, correction=1)))
                values = batch_norm(values, None, None, layer.weight, layer.bias, training=True)
                values = net[3](values.relu()) if i == 0 else values
            outputs.append(values)
        for i, momentum in enumerate(momenta):
            for k in (0, 1):
                mean = torch.stack([each[k] for each in moments[i]]).mean(0)
                running[i][k] = (1 - momentum) * running[i][k] + momentum * mean
    return running, outputs


@pytest.mark.parametrize("n_micro_batches", [2, 3])
def test_a_step_moves_the_statistics_to_the_mean_over_the_parts(n_micro_batches):
    net = network()
    buffers = {name: values.data_ptr() for name, values in net.named_buffers()}
    expected, outputs = naive(copy.deepcopy(net), batches(), n_micro_batches)
    torch.testing.assert_close(train(net, batches(), n_micro_batches), outputs)
    for layer, momentum, (mean, variance) in zip(
        (net[1], net[4]), (0.1, 0.3), expected, strict=True
    ):
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, variance)
        assert layer.num_batches_tracked == 7 + STEPS
        assert layer.momentum == momentum
    # Between steps the layers hold them where optimizers and checkpoints expect them.
    assert {name: values.data_ptr() for name, values in net.named_buffers()} == buffers


def test_with_one_part_the_statistics_are_those_of_torch():
    ours, theirs = network(), network()
    train(ours, batches(), n_micro_batches=1)
    for batch in batches():
        theirs(batch)
    for name, values in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], values)


def test_a_pretrained_backbone_keeps_its_statistics_and_is_normalised_by_them():
    net = network()
    before = copy.deepcopy(net).eval()
    statistics = GhostBatchStatistics(net, ALONE, keep=True)
    statistics.train()
    assert net.training
    for batch in batches():
        statistics.start_part()
        torch.testing.assert_close(net(batch), before(batch))
        statistics.finish()
    assert equal(net.state_dict(), before.state_dict())
    GhostBatchStatistics(net, ALONE).train()
    assert net[1].training


def test_frozen_scale_and_shift_leave_the_statistics_and_other_weights_to_training():
    net = network()
    freeze_affine(net)
    trained = {name for name, weights in net.named_parameters() if weights.requires_grad}
    assert trained == {"0.weight", "0.bias", "3.weight", "3.bias"}
    before = net[1].running_mean.clone()
    train(net, batches(), n_micro_batches=1)
    assert not torch.equal(net[1].running_mean, before)


def exchange(rank, folder):
    """In one of two processes, take the steps of `train`, and save what it received."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    workers, net = Workers(rank, 2, torch.device("cpu")), network()
    statistics = GhostBatchStatistics(net, workers)
    for batch in batches():
        for part in range(rank, 3, 2):
            statistics.start_part()
            net(batch[part::3])
        statistics.finish()
    rows = torch.arange(6).view(3, 2) + 10 * rank
    received = {
        "unequal": workers.all_gather(rows[: 3 - 2 * rank]),
        "first has none": workers.all_gather(rows[: 3 * rank]),
        "both have none": workers.all_gather(rows[:0]),
        "sum": workers.all_reduce(rows),
        "unchanged": rows - 10 * rank,
        "broadcast": torch.tensor(workers.broadcast([0.25, 7.0] if rank == 0 else None)),
    }
    common = workers.all_gather(rows, shared=True)
    received["common"] = common.clone()
    torch.distributed.barrier()
    if rank == 1:
        common[0, 0] = 77
    torch.distributed.barrier()
    received["written by the other"] = common[0, 0].clone()
    torch.save((net.state_dict(), received), folder / str(rank))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_exchange_rows_and_have_the_statistics_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(exchange, (tmp_path,), nprocs=2)
    first = torch.arange(6).view(3, 2)
    expected = {
        "unequal": torch.cat([first, first[:1] + 10]),
        "first has none": first + 10,
        "both have none": first[:0],
        "sum": 2 * first + 10,
        "unchanged": first,
        "broadcast": torch.tensor([0.25, 7.0]),
        "common": torch.cat([first, first + 10]),
        "written by the other": torch.tensor(77),
    }
    alone = network()
    train(alone, batches(), n_micro_batches=3)
    for rank in (0, 1):  # of parts 0 and 2, and of part 1
        state, received = torch.load(tmp_path / str(rank))
        assert equal(received, expected)
        for name, values in alone.state_dict().items():
            torch.testing.assert_close(state[name], values)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_runs_of_about_one_length_in_the_order_of_ranks(count):
    for n in (0, 1, 6, 7, 8, 100):
        shards = [Workers(rank, count, torch.device("cpu")).shard(n) for rank in range(count)]
        assert [number for shard in shards for number in shard] == list(range(n))
        lengths = [len(shard) for shard in shards]
        assert max(lengths) - min(lengths) <= 1
