"""Fixtures of training tests."""

import pytest
import torch
from safetensors.torch import save_file

from training import train


def skip_figures(patch):
    """Train without the figure, which takes as long as an epoch; `trained` has one."""
    patch.setattr("rcir.figures.draw_reliability", lambda diagram: None)
    patch.setattr("rcir.figures.to_svg", lambda figure: "<svg/>")


@pytest.fixture(autouse=True)
def _skip_figures(monkeypatch):
    skip_figures(monkeypatch)


@pytest.fixture(scope="session")
def train_apart(tracking_uri, tmp_path_factory):
    """`train_apart(config)` trains in a new folder, for runs that several tests read."""

    def trained(config):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("apart"))
            skip_figures(patch)
            return train(config)

    return trained


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Weights of a small network whose batch statistics are not those of a new one."""
    import timm  # which takes a second, for these tests only

    torch.manual_seed(3)
    model = timm.create_model("test_resnet")
    model(torch.rand(8, 3, 64, 64))
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(model.state_dict(), path)
    return str(path)
