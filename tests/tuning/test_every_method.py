"""A sweep over an option of each method, or of its loss."""

import pytest

from tests.methods import OPTIONS, TRAINED, config_of
from tuning import TuningConfig, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

VARIED = {
    "deterministic": ("encoder.options.unit", [True, False]),
    "mc-dropout": ("encoder.options.channels", [True, False]),
    "deep-ensemble": ("encoder.options.combination", ["distance", "aligned"]),
    "btl": ("encoder.options.variance_hidden", [8, 16]),
    "vmf": ("encoder.options.concentration_hidden", [8, 16]),
    "tripreg": ("encoder.options.unit", [True, False]),
    "hib": ("encoder.options.components", [0, 2]),
    "pfe": ("encoder.options.lr", [1e-3, 1e-2]),
    "lam": ("encoder.options.online", [True, False]),
    "norm-softmax": ("loss.temperature", [0.1, 0.2]),
}


def test_every_method_is_varied():
    assert sorted(VARIED) == TRAINED
    assert OPTIONS.keys() <= VARIED.keys()


@pytest.mark.parametrize("method", TRAINED)
def test_trials_differ_by_the_option_of_the_method(method, ray_cluster, store, small):
    option, values = VARIED[method]
    encoder = config_of(method, dim=8)
    config = small(f"sweep-{method}", epochs=1, encoder=encoder)
    records = sweep(TuningConfig(config, {option: {"grid": values}}, trials=1, alpha=0.3))
    trials = list(records.trials.values())
    assert {trial.state for trial in trials} == {"finished"}
    assert sorted(str(trial.values[option]) for trial in trials) == sorted(map(str, values))
    assert len({tuple(sorted(trial.metrics.items())) for trial in trials}) == len(values)
