"""What is drawn from a space, and spaces that are none."""

import json
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, loguniform, uniform

from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from training import TrainingConfig
from tuning.space import check_space, draw, with_values

BASE = TrainingConfig("base")
SPACE = {
    "loss.margin": {"uniform": [0.2, 0.3]},
    "loss.kl_scale": {"loguniform": [1e-6, 1e-2]},
    "encoder.dim": {"uniform": [6, 8]},
    "batch": {"loguniform": [4, 64]},
    "mining.positive": {"choice": ["nearest", "random"]},
}


def column(drawn, name):
    return [values[name] for values in drawn]


def test_draws_have_the_distribution_of_the_space():
    drawn = draw(BASE, SPACE, 1500, seed=0)
    assert kstest(column(drawn, "loss.margin"), uniform(0.2, 0.1).cdf).pvalue > 0.01
    assert kstest(column(drawn, "loss.kl_scale"), loguniform(1e-6, 1e-2).cdf).pvalue > 0.01
    for name, values in (("encoder.dim", [6, 7, 8]), ("mining.positive", ["nearest", "random"])):
        found = column(drawn, name)
        assert {*found} == {*values}
        assert chisquare([found.count(value) for value in values]).pvalue > 0.01
    batches = column(drawn, "batch")
    assert (min(batches), max(batches)) == (4, 64)
    assert np.mean(np.array(batches) < 16) == pytest.approx(0.5, abs=0.05)  # sqrt(4 * 64)


def test_draws_are_options_in_the_order_of_the_space_and_survive_json():
    drawn = draw(BASE, SPACE, 20, seed=0)
    for values in drawn:
        assert list(values) == list(SPACE)
        assert {type(values[name]) for name in ("encoder.dim", "batch")} == {int}
        assert json.loads(json.dumps(values)) == values
        assert asdict(with_values(BASE, values))["encoder"]["dim"] == values["encoder.dim"]


def test_draws_depend_on_the_seed_alone():
    first = draw(BASE, SPACE, 10, seed=3)
    assert first == draw(BASE, SPACE, 10, seed=3) != draw(BASE, SPACE, 10, seed=4)
    assert first[:4] == draw(BASE, SPACE, 4, seed=3)


def test_a_grid_gives_all_combinations_and_every_one_has_draws_of_its_own():
    space = {
        "epochs": {"grid": [2, 4, 8]},
        "loss.margin": {"uniform": [0.1, 0.2]},
        "mining.positive": {"grid": ["nearest", "random"]},
    }
    drawn = draw(BASE, space, 3, seed=0)
    points = [(values["epochs"], values["mining.positive"]) for values in drawn]
    for repeat in range(3):
        expected = {*product([2, 4, 8], ["nearest", "random"])}
        assert {*points[6 * repeat : 6 * repeat + 6]} == expected
    assert len({*column(drawn, "loss.margin")}) == len(drawn) == 18


def test_of_a_grid_alone_each_point_is_drawn_once():
    space = {"epochs": {"grid": [2, 4]}, "mining.positive": {"grid": ["nearest", "random"]}}
    drawn = draw(BASE, space, 3, seed=0)
    assert [tuple(values.values()) for values in drawn] == [*product([2, 4], ["nearest", "random"])]


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
def test_whether_draws_are_whole_is_decided_by_the_option(kind):
    """Not by how the ends are written."""
    space = {
        "loss.margin": {kind: [1, 3]},
        "mining.margin": {kind: [1, 3]},
        "epochs": {kind: [1, 3]},
    }
    drawn = draw(BASE, space, 60, seed=0)
    assert {*column(drawn, "epochs")} == {1, 2, 3}
    for name in ("loss.margin", "mining.margin"):
        assert len({*column(drawn, name)}) == 60
        assert 1 <= min(column(drawn, name)) <= max(column(drawn, name)) <= 3


def test_values_change_what_they_name_and_nothing_else():
    changed = with_values(BASE, {"loss.kl_scale": 0.5, "epochs": 3})
    assert (changed.loss["kl_scale"], changed.epochs) == (0.5, 3)
    assert with_values(changed, {"loss.kl_scale": 1e-6, "epochs": 8}) == BASE


def test_another_encoder_is_mined_as_suits_it_unless_mining_was_chosen():
    other = TrainingConfig("base", encoder=EncoderConfig("mc-dropout"))
    assert other.mining != BASE.mining
    assert with_values(BASE, {"encoder.method": "mc-dropout"}) == other
    chosen = replace(BASE, mining=MiningConfig("nearest", "hardest"))
    assert with_values(chosen, {"encoder.method": "mc-dropout"}).mining == chosen.mining
    found = with_values(
        BASE, {"encoder.method": "mc-dropout", "mining.negatives": "margin-violating"}
    )
    assert found.mining == replace(other.mining, negatives="margin-violating")


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "space names no option"),
        ({"seed": {"choice": [1, 2]}}, "space names seed, .*set it in seeds"),
        ({"data.seed": {"choice": [1]}}, r"space names data\.seed, .*set it in training"),
        ({"num_workers": {"choice": [1, 2]}}, "all trials share"),
        ({"name": {"choice": ["a"]}}, "all trials share"),
        ({"storage": {"choice": ["a"]}}, "all trials share"),
        ({"changes": {"choice": [[]]}}, "all trials share"),
        (
            {"loss": {"choice": [{}]}},
            r"space names loss, a group of options: name one, loss\.OPTION",
        ),
        ({"loss.margin": {"normal": [0, 1]}}, "give one of uniform, loguniform, choice, grid"),
        ({"loss.margin": {"uniform": [0, 1], "choice": [1]}}, "give one of"),
        ({"loss.margin": {}}, "give one of"),
        ({"loss.margin": {"choice": []}}, "at least one value, each once"),
        ({"loss.margin": {"grid": [0.1, 0.2, 0.1]}}, "at least one value, each once"),
        ({"loss.margin": {"uniform": [0.1]}}, r"two numbers \[low, high\]"),
        ({"loss.margin": {"uniform": [0.1, 0.2, 0.3]}}, "two numbers"),
        ({"loss.margin": {"uniform": [0.2, 0.1]}}, "two numbers"),
        ({"loss.margin": {"uniform": [0.2, 0.2]}}, "two numbers"),
        ({"loss.margin": {"uniform": [0.2, "1"]}}, "two numbers"),
        ({"loss.margin": {"uniform": [False, True]}}, "two numbers"),
        ({"loss.margin": {"uniform": [0.2, np.inf]}}, "two numbers"),
        ({"loss.margin": {"loguniform": [np.nan, 1.0]}}, "two numbers"),
        ({"loss.margin": {"loguniform": [0, 1]}}, "both must be above 0"),
        ({"loss.no_such": {"choice": [1]}}, r"loss\.no_such|no_such"),
        ({"no_such": {"choice": [1]}}, "no_such"),
        ({"no.such": {"choice": [1]}}, r"no\.such is no option of a training"),
        ({"loss.margin.deeper": {"choice": [1]}}, r"loss\.margin\.deeper"),
        ({"epochs": {"choice": ["a"]}}, "epochs a: "),
        ({"epochs": {"choice": [3, 1.5]}}, r"epochs 1\.5: "),
        ({"epochs": {"uniform": [1.5, 2.5]}}, r"epochs 1\.5: "),
        ({"epochs": {"uniform": [0, 5]}}, "epochs 0: epochs is 0"),
        ({"encoder.method": {"choice": ["btl", "magic"]}}, "magic"),
        ({"encoder.options.passes": {"uniform": [1, 5]}}, r"encoder\.options\.passes 1: "),
        ({"encoder.options.dropout": {"uniform": [0.1, 0.5]}}, "no option dropout; there are var"),
        (
            {"encoder.method": {"choice": ["btl", "mc-dropout"]}, "loss.kl_scale": {"grid": [0]}},
            "loss of mc-dropout: there is no option kl_scale; there are margin, form",
        ),
        ({"optimizer.lr": {"grid": [-1.0]}}, r"optimizer\.lr is -1\.0"),
        ({"loss.margin": {"uniform": [-0.1, 0.1]}}, r"loss\.margin is -0\.1"),
        ({"mining.pool": {"choice": [1]}}, r"mining\.pool is 1"),
    ],
)
def test_an_impossible_space_is_refused(space, message):
    with pytest.raises(InvalidConfig, match=message):
        check_space(BASE, space)
