"""Calibrations that several modules read, and one without figures."""

import pytest

from calibration import CalibrationConfig, calibrate


@pytest.fixture(scope="session")
def outcome(trained, tracking_uri, tmp_path_factory):
    """The tiny training run, calibrated with alphas of which the first cannot be certified."""
    output = tmp_path_factory.mktemp("calibrated")
    return calibrate(
        CalibrationConfig(
            str(trained.path),
            str(output),
            score_function="minmax",
            query_uncertainty="encoder",
            group="occluded",
            depth=150,
            alphas=(0.001, 0.2, 0.3),
            delta=0.05,
        )
    )


@pytest.fixture(scope="session")
def chosen(trained, tracking_uri, tmp_path_factory):
    """The same run, calibrated as by default: the score function is chosen."""
    output = tmp_path_factory.mktemp("chosen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        return calibrate(CalibrationConfig(str(trained.path), str(output), alphas=(0.2, 0.3)))


@pytest.fixture
def never_embedded(monkeypatch):
    """No image may be embedded."""

    def refuse(*_):
        pytest.fail("something was embedded")

    monkeypatch.setattr("rcir.encoders.batches.embed", refuse)
    monkeypatch.setattr("calibration.data_sets.Embedder.__call__", refuse)
