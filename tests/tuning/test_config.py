import pytest

from rcir.errors import InvalidConfig, InvalidRiskLevel
from training import TrainingConfig
from tuning import TuningConfig
from tuning.config import override

BASE = TrainingConfig("base")


def test_override_changes_what_is_named_and_nothing_else():
    changed = override(BASE, {"loss.kl_scale": 0.5, "epochs": 3, "data.options": {"train": 10}})
    assert (changed.loss.kl_scale, changed.epochs, changed.data.options) == (0.5, 3, {"train": 10})
    assert override(changed, {"loss.kl_scale": 1e-6, "epochs": 8, "data.options": {}}) == BASE


def test_samples_lie_in_the_space():
    space = {"loss.margin": {"uniform": [0.2, 0.3]}, "loss.kl_scale": {"loguniform": [1e-6, 1e-4]}}
    sampled = TuningConfig(BASE, space).sampled()
    for name, (low, high) in (("loss.margin", (0.2, 0.3)), ("loss.kl_scale", (1e-6, 1e-4))):
        drawn = [sampled[name].sample() for _ in range(50)]
        assert low <= min(drawn) < max(drawn) <= high


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "at least 1"),
        ({"loss.no_such": {"choice": [1]}}, "no option of a training"),
        ({"loss.margin.deeper": {"choice": [1]}}, "no option of a training"),
        ({"loss.margin": {"normal": [0, 1]}}, "give one of choice, grid, loguniform, uniform"),
        ({"loss.margin": {"uniform": [0, 1], "choice": [1]}}, "give one of"),
    ],
)
def test_an_impossible_space_is_refused_before_anything_starts(space, message):
    with pytest.raises(InvalidConfig, match=message):
        TuningConfig(BASE, space)


def test_the_guarantee_that_decides_must_be_one():
    with pytest.raises(InvalidRiskLevel, match="alpha is 0"):
        TuningConfig(BASE, {"epochs": {"choice": [1]}}, alpha=0)
