"""Every method trains, goes on after an interruption, calibrates, is stored, and answers."""

import pytest
import torch
from safetensors.torch import load_file

import rcir
from calibration import CalibrationConfig, calibrate
from rcir.errors import InvalidConfig
from tests.methods import CERTAIN, MADE_OF_OTHERS, TRAINED, config_of
from training import train

pytestmark = pytest.mark.slow


class Stop:
    """Stops a training after its first epoch."""

    def after_report(self, run_context, metrics, checkpoint):
        if metrics[0]["epoch"] == 1:
            raise SystemExit("enough")


@pytest.fixture
def training_of(tiny):
    """`training_of(method, name)`: two epochs on a few two-digit numbers."""
    return lambda method, name: tiny(name, epochs=2, encoder=config_of(method, dim=8))


@pytest.mark.parametrize("method", [name for name in TRAINED if name not in MADE_OF_OTHERS])
def test_an_interrupted_training_ends_with_the_same_weights(method, training_of):
    whole = train(training_of(method, "whole"))
    halved = training_of(method, "halved")
    with pytest.raises(SystemExit):
        train(halved, callback=Stop())
    again = train(halved)
    expected, found = (load_file(run.path / "encoder.safetensors") for run in (whole, again))
    assert expected.keys() == found.keys()
    assert all(torch.equal(values, found[name]) for name, values in expected.items())


@pytest.mark.parametrize("method", TRAINED)
def test_a_trained_encoder_is_calibrated_stored_and_answers_as_it_was_measured(method, training_of):
    run = train(training_of(method, "run"))
    outcome = calibrate(CalibrationConfig(str(run.path), alphas=(0.5, 0.9)))
    (row,) = (row for row in outcome.evaluation.rows if row.alpha == 0.9)
    assert row.threshold is not None
    numbers = outcome.evaluation.quality.numbers
    assert ("agreement" in outcome.retriever.uncertainties) == ("auroc_miss_agreement" in numbers)
    loaded = rcir.load(outcome.folder)
    assert (loaded.item_uncertainty is None) == (method in CERTAIN)
    images = list(outcome.splits.test.images[:100])
    answers = loaded.retrieve(images, 0.9, 0.1)
    asked = outcome.test[:100].scored(loaded.controller.score_function)
    expected = asked.sizes(loaded.controller.decide(rcir.risk.Request(0.9, 0.1)).threshold)
    assert [answer.size for answer in answers] == expected.tolist()


def test_a_loss_of_another_method_is_refused(tiny):
    with pytest.raises(InvalidConfig, match="there is no option kl_scale"):
        tiny(encoder=config_of("tripreg"), loss={"kl_scale": 1.0})
