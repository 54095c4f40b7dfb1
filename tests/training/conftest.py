"""Fixtures of training tests."""

import pytest

from training import train


@pytest.fixture(scope="session")
def train_apart(tracking_uri, tmp_path_factory):
    """`train_apart(config)` trains in a new folder, for runs that several tests read."""

    def trained(config, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("apart"))
            patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
            return train(config, **options)

    return trained
