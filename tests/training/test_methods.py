"""Every encoder trains, and is usable afterwards."""

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from scipy.linalg import orthogonal_procrustes

from rcir.data import Preprocessing, load_splits
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.runs.folder import read_run
from training import train


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in ("deterministic", "mc-dropout", "btl", "vmf", "tripreg")),
        *(("lam", {"online": online}) for online in (False, True)),
    ],
)
def test_a_trained_encoder_embeds(tiny, method, options):
    config = tiny(method, epochs=1, encoder=EncoderConfig(method, dim=8, options=options))
    run = train(config)
    assert read_run(run.path).finished
    images = load_splits(config.data).test.images
    embedding = embed(run.encoder(), run.preprocessing, images)
    assert embedding.vectors.shape == (300, 8)
    if method != "tripreg":
        np.testing.assert_allclose(embedding.vectors.norm(dim=1), 1, atol=1e-5)
    if method == "deterministic":
        assert embedding.uncertainty is None
    else:
        assert embedding.uncertainty.min() > 0
        assert len(embedding.uncertainty.unique()) > 250


@pytest.fixture(scope="module")
def ensemble(tiny, tracking_uri, tmp_path_factory):
    """A finished run of an ensemble of two, to be read only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ensemble"))
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        config = tiny(
            "ensemble",
            epochs=1,
            encoder=EncoderConfig("deep-ensemble", dim=8, options={"members": 2}),
        )
        return train(config)


def test_members_are_runs_of_their_own_below_the_ensembles(ensemble):
    client = MlflowClient(ensemble.tracking_uri)
    experiment = client.get_run(ensemble.mlflow_run).info.experiment_id
    parent = f"tags.`mlflow.parentRunId` = '{ensemble.mlflow_run}'"
    children = client.search_runs([experiment], parent)
    assert {child.info.run_name for child in children} == {"member-0", "member-1"}
    assert {child.info.status for child in children} == {"FINISHED"}
    assert len({child.data.params["seed"] for child in children}) == 2


def test_members_have_the_weights_of_their_runs_and_differ(ensemble):
    weights = []
    for number, member in enumerate(ensemble.encoder().members):
        run = read_run(ensemble.path / "members" / f"member-{number}")
        own = run.encoder().state_dict()
        for name, values in member.state_dict().items():
            assert torch.equal(values, own[name])
        weights.append(torch.cat([values.flatten() for values in own.values()]))
    assert not torch.allclose(weights[0], weights[1], atol=1e-2)


def test_members_are_rotated_onto_the_first(ensemble):
    encoder = ensemble.encoder()
    images = load_splits(ensemble.data).train.images
    with torch.inference_mode():
        vectors = encoder.member_vectors(Preprocessing()(images)).double().numpy()
    expected, _ = orthogonal_procrustes(vectors[1], vectors[0])
    np.testing.assert_allclose(encoder.rotations[1].numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(encoder.rotations[0].numpy(), np.eye(8), atol=1e-5)


def test_an_ensemble_ranks_by_the_mean_of_its_members_distances(ensemble):
    encoder = ensemble.encoder()
    images = Preprocessing()(load_splits(ensemble.data).test.images[:20])
    joint = encoder.embed(images).vectors
    with torch.inference_mode():
        members = encoder.member_vectors(images)
    of_members = [torch.cdist(each, each).square() for each in members]
    np.testing.assert_allclose(torch.cdist(joint, joint).square(), sum(of_members) / 2, atol=1e-5)
