"""What is trained already, or by itself, gets a variance in a run of its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.data import Augmentation, DataConfig, load_splits
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.errors import InvalidConfig, InvalidData
from rcir.runs.folder import read_run
from rcir.runs.trained_on import TrainedOn
from training import train

BRIEF = {"steps": 30, "batch": 32}


@pytest.fixture(scope="module")
def whole(tiny, tracking_uri, tmp_path_factory):
    """A finished run that trained its base too, to be read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pfe"))
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        encoder = EncoderConfig("pfe", dim=8, options=BRIEF)
        return train(tiny("pfe", epochs=1, encoder=encoder, loss={"margin": 0.2}))


def embedded(run):
    return embed(run.encoder(), run.preprocessing, load_splits(run.data).test.images)


def test_the_base_is_a_run_of_its_own_whose_vectors_stay(whole):
    base = read_run(whole.path / "members" / "member-0")
    assert base.config["encoder"]["method"] == "deterministic"
    assert base.config["loss"] == {"margin": 0.2, "form": "squared", "scale": 10.0}
    assert torch.equal(embedded(whole).vectors, embedded(base).vectors)
    assert len(embedded(whole).uncertainty.unique()) > 250


def test_with_weights_of_the_base_nothing_is_trained_but_the_variance(whole, tiny, tmp_path):
    base = whole.path / "members" / "member-0" / "encoder.safetensors"
    options = {**BRIEF, "base_weights": str(base)}
    again = tiny(
        "again", storage=str(tmp_path), encoder=EncoderConfig("pfe", dim=8, options=options)
    )
    run = train(again)
    assert not (run.path / "checkpoints").exists()
    assert not (run.path / "members").exists()
    found, expected = embedded(run), embedded(whole)
    for name, values in expected.tensors.items():
        assert torch.equal(found.tensors[name], values)  # one seed, one fit
    assert train(again).finished  # and is not trained again


def test_what_the_base_was_trained_on_cannot_certify_it(whole, tiny, tmp_path):
    """Of another draw of the data, some queries are pictures that trained the base."""
    base = whole.path / "members" / "member-0" / "encoder.safetensors"
    options = {**BRIEF, "base_weights": str(base)}
    other = DataConfig("digits", seed=5, options=whole.data.options)
    encoder = EncoderConfig("pfe", dim=8, options=options)
    run = train(tiny("other", storage=str(tmp_path), data=other, encoder=encoder))
    known, before = TrainedOn.read(run.path), TrainedOn.read(base.parent)
    assert np.isin(before.images, known.images).all()
    assert len(known.images) > len(before.images)
    splits = load_splits(whole.data)
    with pytest.raises(InvalidData, match="60 classes of the queries trained it"):
        known.require_unseen(replace(splits, calibration=splits.train))


def test_the_record_of_a_base_is_found_above_its_checkpoints_or_it_is_refused(
    whole, tiny, tmp_path
):
    base = whole.path / "members" / "member-0"
    weights = base / "checkpoints" / "epoch-0001" / "model.safetensors"

    def training_of(name, path):
        options = {**BRIEF, "base_weights": str(path)}
        encoder = EncoderConfig("pfe", dim=8, options=options)
        other = DataConfig("digits", seed=5, options=whole.data.options)
        return tiny(name, storage=str(tmp_path / "runs"), data=other, encoder=encoder)

    known = TrainedOn.read(train(training_of("kept", weights)).path)
    assert np.isin(TrainedOn.read(base).images, known.images).all()
    copied = tmp_path / "copied.safetensors"
    copied.write_bytes(weights.read_bytes())
    with pytest.raises(InvalidData, match=r"no trained_on\.json beside it"):
        train(training_of("copied", copied))
    assert not (tmp_path / "runs" / "copied" / "run.json").exists()


def test_a_random_base_is_refused(tiny):
    options = {**BRIEF, "base": "pretrained"}
    with pytest.raises(InvalidConfig, match="its backbone is random"):
        train(tiny(encoder=EncoderConfig("pfe", options=options)))


def test_a_frozen_pretrained_base_is_fitted_on_its_features(tiny, tmp_path, monkeypatch):
    from rcir.encoders import backbones

    # Random weights stand for pretrained ones, which need a download.
    torch.manual_seed(0)
    fixed = {name: each.clone() for name, each in backbones._mnist_cnn(1).state_dict().items()}

    def build(name, channels, pretrained, checkpoint_path=None):
        network = backbones._mnist_cnn(channels)
        if pretrained:
            network.load_state_dict(fixed)
        return network

    monkeypatch.setattr("rcir.encoders.features.build_backbone", build)
    options = {**BRIEF, "base": "pretrained"}
    encoder = EncoderConfig("pfe", pooling="avg", pretrained=True, freeze=True, options=options)
    run = train(tiny("frozen", storage=str(tmp_path), encoder=encoder, augmentation=Augmentation()))
    found = embedded(run)
    assert found.vectors.shape == found.variance.shape == (300, 64)
    kept = run.encoder().of_base.base.backbone.backbone.state_dict()
    assert all(torch.equal(values, fixed[name]) for name, values in kept.items())


def test_a_base_with_another_loss_is_not_trained_in_the_same_run(tiny):
    with pytest.raises(InvalidConfig, match="train it in a run of its own"):
        tiny(encoder=EncoderConfig("pfe", options={"base": "norm-softmax"}))
