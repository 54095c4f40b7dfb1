"""Every method trains, is usable afterwards, calibrates, is stored, and answers."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

import rcir
from calibration import CalibrationConfig, calibrate
from rcir.data import DataConfig, load_splits
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.errors import InvalidConfig, InvalidData
from rcir.runs.folder import TrainedOn, read_run
from tests.methods import CERTAIN, MADE_OF_OTHERS, TRAINED, config_of
from tests.training.helpers import Stop, epochs, equal, same_weights, trainer_of, unfinish
from training import train

BRIEF = {"steps": 30, "batch": 32}


def embedded(run):
    return embed(run.encoder(), run.preprocessing, load_splits(run.data).test.images)


@pytest.mark.parametrize("method", [name for name in TRAINED if name not in MADE_OF_OTHERS])
def test_an_epoch_of_every_method_gives_an_encoder_with_its_uncertainty(tiny, method):
    options = {"online": True} if method == "lam" else {}
    config = tiny(encoder=config_of(method, dim=8, options=options))
    trainer = trainer_of(config, load_splits(config.data).train.subset(np.arange(160)))
    before = {name: each.clone() for name, each in trainer.encoder.state_dict().items()}
    (metrics,) = epochs(trainer)
    assert np.isfinite(metrics["loss"])
    assert not equal(trainer.encoder.state_dict(), before)
    images = load_splits(config.data).test.images
    check(embed(trainer.encoder.eval(), config.preprocessing, images), method)


def check(embedding, method):
    """The embedding of 300 different images has the form of its method."""
    assert embedding.vectors.shape == (300, 8)
    if method not in ("tripreg", "hib"):
        np.testing.assert_allclose(embedding.vectors.norm(dim=1), 1, atol=1e-4)
    assert (embedding.uncertainty is None) == (method in CERTAIN)
    if embedding.uncertainty is not None:
        assert embedding.uncertainty.min() > 0
        assert len(embedding.uncertainty.unique()) > 250


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINED)
def test_a_trained_encoder_is_calibrated_stored_and_answers_as_it_was_measured(method, tiny):
    run = train(tiny("run", epochs=2, encoder=config_of(method, dim=8)))
    outcome = calibrate(CalibrationConfig(str(run.path), alphas=(0.5, 0.9)))
    (row,) = (row for row in outcome.evaluation.rows if row.alpha == 0.9)
    assert row.threshold is not None
    loaded = rcir.load(outcome.folder)
    assert (loaded.searcher.gallery.uncertainty is None) == (method in CERTAIN)
    answers = loaded.retrieve(list(outcome.splits.data.test.images[:100]), 0.9, 0.1)
    rule = loaded.calibration.miss_rule
    guarantee = rule.guarantee(rcir.risk.make_request(0.9, 0.1))
    _, expected = rule.sets(outcome.splits.arranged_test.results[:100], guarantee)
    assert [answer.size for answer in answers] == expected.tolist()


@pytest.fixture(scope="module")
def ensemble(tiny, train_apart):
    """A finished run of an ensemble of two, to be read only."""
    encoder = EncoderConfig("deep-ensemble", dim=8, options={"members": 2})
    return train_apart(tiny("ensemble", epochs=1, encoder=encoder))


def test_members_are_runs_below_that_of_the_ensemble_and_are_kept(ensemble, tiny, tmp_path):
    client = MlflowClient(ensemble.tracking_uri)
    parent = client.get_run(ensemble.mlflow_run)
    tags = {name: parent.data.tags[name] for name in ("kind", "encoder", "dataset")}
    assert tags == {"kind": "training", "encoder": "deep-ensemble", "dataset": "digits"}
    below = f"tags.`mlflow.parentRunId` = '{ensemble.mlflow_run}' and tags.kind = 'member'"
    members = client.search_runs([parent.info.experiment_id], below)
    assert {member.info.run_name for member in members} == {"member-0", "member-1"}
    assert {member.info.status for member in members} == {"FINISHED"}
    assert len({member.data.params["seed"] for member in members}) == 2
    for member in members:  # whose curves the ensemble has, too
        name = f"loss/{member.info.run_name}"
        (ours,) = client.get_metric_history(ensemble.mlflow_run, name)
        (theirs,) = client.get_metric_history(member.info.run_id, "loss")
        assert (ours.step, ours.value, ours.timestamp) == (1, theirs.value, theirs.timestamp)
    metrics = members[0].data.metrics
    assert (metrics["best_epoch"], metrics["workers"]) == (1, 1)
    # 300 images of 60 classes, five each: each is an anchor once, with a positive, two negatives.
    images = metrics["images_per_second"] * metrics["seconds"]
    assert images == pytest.approx(300 * 4)
    (used,) = members[0].inputs.dataset_inputs
    assert used.dataset.name == "digits"
    assert {tag.value for tag in used.tags} == {"training"}

    # Stopped without its second member, the ensemble keeps the first one.
    folder = tmp_path / "runs" / "ensemble"
    shutil.copytree(ensemble.path, folder)
    unfinish(folder)
    first, second = (folder / "members" / f"member-{number}" for number in (0, 1))
    shutil.rmtree(second)
    before, recorder = (first / "encoder.safetensors").stat().st_mtime_ns, Stop()
    again = train(tiny("ensemble", epochs=1, encoder=ensemble.encoder().config), callback=recorder)
    assert recorder.reports == []  # an ensemble has no epochs
    assert again.mlflow_run == ensemble.mlflow_run
    assert (first / "encoder.safetensors").stat().st_mtime_ns == before
    assert same_weights(again, ensemble)
    weights = []
    for number, member in enumerate(ensemble.encoder().members):
        run = read_run(ensemble.path / "members" / f"member-{number}")
        assert equal(member.state_dict(), run.encoder().state_dict())
        weights.append(torch.cat([values.flatten() for values in member.state_dict().values()]))
    assert not torch.allclose(weights[0], weights[1], atol=1e-2)
    rotation = ensemble.encoder().rotations[1]  # fitted after the training
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(8), atol=1e-4)
    assert not torch.allclose(rotation, torch.eye(8), atol=1e-2)


def pfe_config(**options):
    return EncoderConfig("pfe", dim=8, options={**BRIEF, **options})


@pytest.fixture(scope="module")
def whole(tiny, train_apart):
    """A finished run of pfe that trained its base too, to be read only."""
    return train_apart(tiny("pfe", epochs=1, encoder=pfe_config(), loss={"margin": 0.2}))


def test_the_base_of_pfe_is_a_run_whose_vectors_stay(whole):
    base = read_run(whole.path / "members" / "member-0")
    assert base.config["encoder"]["method"] == "deterministic"
    assert base.config["loss"]["margin"] == 0.2
    assert torch.equal(embedded(whole).vectors, embedded(base).vectors)
    assert len(embedded(whole).uncertainty.unique()) > 250


def test_with_weights_of_the_base_only_the_variance_is_trained(whole, tiny, tmp_path):
    base = whole.path / "members" / "member-0" / "encoder.safetensors"
    config = tiny("again", storage=str(tmp_path), encoder=pfe_config(base_weights=str(base)))
    run = train(config)
    assert not (run.path / "checkpoints").exists()
    assert not (run.path / "members").exists()
    assert equal(embedded(run).tensors, embedded(whole).tensors)  # one seed, one fit
    assert train(config).finished  # and is not trained again


@pytest.mark.parametrize(
    "name", ["encoder.safetensors", "checkpoints/epoch-0001/model.safetensors"]
)
def test_what_trained_the_base_of_pfe_cannot_certify_it(name, whole, tiny, tmp_path):
    """In another draw of the data, some queries are images that trained the base."""
    base = whole.path / "members" / "member-0"
    other = DataConfig("digits", seed=5, options=whole.data.options)
    encoder = pfe_config(base_weights=str(base / name))
    run = train(tiny("other", storage=str(tmp_path), data=other, encoder=encoder))
    seen, before = TrainedOn.read(run.path), TrainedOn.read(base)
    assert np.isin(before.images, seen.images).all()
    assert len(seen.images) > len(before.images)
    splits = load_splits(whole.data)
    with pytest.raises(InvalidData, match="60 classes"):
        seen.require_unseen(replace(splits, calibration=splits.train))


def test_weights_of_a_base_without_a_record_of_its_images_are_refused(whole, tiny, tmp_path):
    copy = tmp_path / "copied.safetensors"
    copy.write_bytes((whole.path / "members" / "member-0" / "encoder.safetensors").read_bytes())
    encoder = pfe_config(base_weights=str(copy))
    with pytest.raises(InvalidData, match="trained_on"):
        train(tiny("copied", storage=str(tmp_path), encoder=encoder))
    assert not (tmp_path / "copied" / "run.json").exists()


def test_bases_that_cannot_be_fitted_are_refused(tiny):
    with pytest.raises(InvalidConfig, match="random"):
        train(tiny(encoder=pfe_config(base="pretrained")))
    with pytest.raises(InvalidConfig, match="base_weights"):
        EncoderConfig("pfe", options={"base": "norm-softmax"})
