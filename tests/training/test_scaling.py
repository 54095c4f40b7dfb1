"""The workers that a training on GPUs asks for, of a cluster that only says that it has some."""

from pathlib import Path

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from rcir.config import parse
from rcir.errors import InvalidConfig
from tests.training.helpers import ON_RAY
from training import TrainingConfig
from training.loop import scaling_config

pytestmark = [pytest.mark.slow, *ON_RAY]
RECIPES = Path(__file__).parents[2] / "configs" / "cai2025"


@pytest.fixture
def cluster(new_cluster):
    """A head of 8 CPUs without a GPU, to which this process is connected."""
    with new_cluster(8) as nodes:
        yield nodes


def recipe(layer):
    """The configuration of BTL on CUB-200, on as many GPUs as a layer says."""
    files = [RECIPES / f"{name}.yaml" for name in ("recipe", "cub200", "btl", layer)]
    words = [word for file in files for word in ("--config", str(file))]
    return parse(TrainingConfig, [*words, "--name", "run"], "test")


def granted(scaling):
    """Return whether the cluster gives what a training asks for."""
    group = placement_group([scaling.resources_per_worker] * scaling.num_workers)
    try:
        return group.wait(30)
    finally:
        remove_placement_group(group)


def test_recipes_get_their_gpus_from_a_cluster_whose_head_has_none(cluster):
    with pytest.raises(InvalidConfig, match="no GPU"):
        scaling_config(recipe("1-gpu"))
    for _ in range(2):
        cluster.add_node(num_cpus=16, num_gpus=8)
    cluster.wait_for_nodes()
    for layer, workers, cpus in (("1-gpu", 1, 2), ("8-gpus", 8, 2), ("16-gpus", 16, 2)):
        config = recipe(layer)
        assert (config.batch, config.n_micro_batches) == (8 * workers, workers)
        # Of the square root of the batch, once the warm-up has passed.
        rate = config.optimizer.rate(2, config.epochs, config.batch)
        assert rate == pytest.approx(1e-5 * workers**0.5 * 0.99)
        scaling = scaling_config(config)
        assert scaling.resources_per_worker == {"GPU": 1, "CPU": cpus}
        assert granted(scaling)
    # A node with fewer CPUs than GPUs: any of its GPUs must have room as well.
    cluster.add_node(num_cpus=1, num_gpus=2)
    cluster.wait_for_nodes()
    scaling = scaling_config(TrainingConfig("run", num_workers=18, use_gpu=True))
    assert scaling.num_workers == 18
    assert granted(scaling)
