"""Draws from the space of a sweep, and spaces that are refused."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, loguniform, uniform

from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from training import TrainingConfig
from tuning.config import check_space, draw, with_values

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


def test_draws_depend_on_the_seed_alone():
    first = draw(BASE, SPACE, 10, seed=3)
    assert first[:4] == draw(BASE, SPACE, 4, seed=3) != draw(BASE, SPACE, 4, seed=4)
    assert json.loads(json.dumps(first)) == first


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
    # Without draws, each point is there once.
    points = draw(BASE, {name: space[name] for name in ("epochs", "mining.positive")}, 3, seed=0)
    assert [tuple(values.values()) for values in points] == [
        *product([2, 4, 8], ["nearest", "random"])
    ]


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
def test_integer_options_get_integer_draws(kind):
    """The type of the option decides, not that of the ends of the interval."""
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
        ({}, "space"),
        *(({name: {"choice": [1]}}, name) for name in ("seed", "data.seed", "num_workers", "name")),
        ({"loss": {"choice": [{}]}}, "group"),
        ({"loss.no_such": {"choice": [1]}}, "no_such"),
        ({"no.such": {"choice": [1]}}, r"no\.such"),
        ({"loss.margin.deeper": {"choice": [1]}}, "deeper"),
        ({"epochs": {"choice": ["a"]}}, "epochs"),
        ({"epochs": {"choice": [3, 1.5]}}, r"1\.5"),
        ({"epochs": {"uniform": [0, 5]}}, "epochs"),  # both ends are tried
        ({"encoder.method": {"choice": ["btl", "magic"]}}, "magic"),
        ({"encoder.options.dropout": {"uniform": [0.1, 0.5]}}, "dropout"),
        (
            {"encoder.method": {"choice": ["btl", "mc-dropout"]}, "loss.kl_scale": {"grid": [0]}},
            "mc-dropout",
        ),
        ({"loss.margin": {"uniform": [-0.1, 0.1]}}, "margin"),
        ({"mining.pool": {"choice": [1]}}, "pool"),
    ],
)
def test_options_that_cannot_vary_are_refused(space, message):
    with pytest.raises(InvalidConfig, match=message):
        check_space(BASE, space)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"normal": [0, 1]},
        {"uniform": [0, 1], "choice": [1]},
        {"choice": []},
        {"grid": [0.1, 0.2, 0.1]},
        *({"uniform": ends} for ends in ([0.1], [0.1, 0.2, 0.3], [0.2, 0.1], [0.2, 0.2])),
        *({"uniform": ends} for ends in ([0.2, "1"], [False, True], [0.2, np.inf])),
        *({"loguniform": ends} for ends in ([np.nan, 1.0], [0, 1])),
    ],
)
def test_values_that_cannot_be_drawn_are_refused(values):
    with pytest.raises(InvalidConfig, match=r"loss\.margin"):
        check_space(BASE, {"loss.margin": values})
