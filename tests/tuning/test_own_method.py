"""A sweep over a method of somebody's own (`tests/toy.py`), named by its import path alone."""

import pytest

from rcir.encoders import EncoderConfig
from rcir.runs.folder import read_run
from tests.toy import Toy
from tuning import TuningConfig, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


@pytest.mark.usefixtures("ray_cluster", "store")
def test_its_options_and_those_of_its_loss_are_swept(small):
    base = small("own", encoder=EncoderConfig("tests.toy:Toy", dim=8), epochs=1)
    space = {
        "encoder.options.width": {"grid": [4, 6]},
        "loss.temperature": {"uniform": [0.05, 0.2]},
    }
    records = sweep(TuningConfig(base, space, trials=1, alpha=0.15, delta=0.2))
    assert [trial.state for trial in records.trials.values()] == ["finished", "finished"]
    for trial in records.trials.values():
        run = read_run(records.folder / trial.name)
        encoder = run.encoder()
        assert isinstance(encoder, Toy)
        assert encoder.direction.in_features == trial.values["encoder.options.width"]
        assert 0.05 <= trial.values["loss.temperature"] <= 0.2
        assert trial.certified_size >= 1
    assert {t.values["encoder.options.width"] for t in records.trials.values()} == {4, 6}
