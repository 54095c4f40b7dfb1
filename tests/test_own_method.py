"""A method in a user's own file (`tests/toy.py`), named by its import path: trained to loaded."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import rcir
from calibration import CalibrationConfig, calibrate
from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.embedding import Embedding
from rcir.encoders import Encoder, EncoderConfig
from rcir.errors import InvalidConfig
from rcir.retrieval.retriever import Retriever
from tests.toy import Toy
from tests.training.helpers import equal, unfinish
from training import Change, TrainingConfig, train
from training.checkpoint import read_state
from tuning.config import check_space, with_values

TOY = "tests.toy:Toy"
SIZES = {"train": 200, "validation": 100, "gallery": 120, "tuning": 60, "test": 60}
DATA = DataConfig("digits", options={**SIZES, "calibration": 150})


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return TrainingConfig(
        "toy",
        storage=str(tmp_path_factory.mktemp("toys")),
        epochs=3,
        batch=32,
        micro_batches=2,
        data=DATA,
        encoder=EncoderConfig(TOY, dim=8, options={"width": 12}),
        loss={"temperature": 0.2},
        changes=(Change(2, {"loss.temperature": 0.05}),),
    )


@pytest.fixture(scope="module")
def run(config, tracking_uri):
    return train(config)


@pytest.fixture(scope="module")
def toy_splits():
    return load_splits(DATA)


def test_training_uses_its_loss_mining_and_hooks(run, config, toy_splits):
    encoder = run.encoder()
    assert isinstance(encoder, Toy)
    assert (config.mining.positive, config.mining.negatives) == ("random", "hardest")
    assert config.at(2).loss == {"temperature": 0.05}
    assert encoder.steps.item() == math.ceil(200 / 32) * read_state(run.path).best_epoch
    embedding = encoder.embed(run.preprocessing(toy_splits.train.images))
    # Fitted after training: the mean concentration of the training images is 1.
    assert embedding.extra["concentration"].mean().item() == pytest.approx(1, rel=1e-3)


def test_interrupted_training_continues_to_the_same_weights(run, config):
    weights = load_file(run.path / "encoder.safetensors")

    class Interrupted(Exception):
        pass

    class Stop:
        def after_report(self, context, metrics, checkpoint):
            raise Interrupted

    other = replace(config, name="interrupted")
    with pytest.raises(Interrupted):
        train(other, callback=Stop())
    again = train(other)
    assert equal(load_file(again.path / "encoder.safetensors"), weights)
    unfinish(run.path)
    assert equal(load_file(train(config).path / "encoder.safetensors"), weights)


def test_sweep_accepts_its_options_and_refuses_those_of_other_methods(config):
    space = {"encoder.options.width": {"uniform": [8, 16]}, "loss.temperature": {"choice": [0.1]}}
    check_space(config, space)
    assert with_values(config, {"encoder.options.width": 9}).encoder.options == {"width": 9}
    base = TrainingConfig("base", loss={"kl_scale": 1e-4})
    with pytest.raises(InvalidConfig, match=r"kl_scale.*temperature"):
        with_values(base, {"encoder.method": TOY})
    defaults = with_values(TrainingConfig("base"), {"encoder.method": TOY})
    assert (defaults.loss, defaults.mining.negatives) == ({"temperature": 0.1}, "hardest")
    for options in ({"members": 3}, {"variance_hidden": 8}):
        with pytest.raises(InvalidConfig, match="width"):
            EncoderConfig(TOY, options=options)


def test_calibrated_retriever_stores_its_tensors_and_ranks_by_its_distances(
    run, toy_splits, tmp_path, no_figures
):
    outcome = calibrate(CalibrationConfig(str(run.path), str(tmp_path / "out"), alphas=(0.3,)))
    loaded = rcir.load(outcome.folder)
    assert isinstance(loaded.encoder, Toy)
    assert sorted(loaded.searcher.gallery.items.extra) == ["concentration", "draws"]
    queries = toy_splits.test.images[:5]
    results = loaded.search(queries)
    vectors = loaded.encoder.embed(loaded.preprocessing(queries)).vectors
    draws = loaded.searcher.gallery.items.extra["draws"].numpy()
    # Brute force: the mean of a query's distances to all draws of an image.
    for row, vector in enumerate(vectors.numpy()):
        distances = np.sqrt(((draws - vector) ** 2).sum(2)).mean(1)[results.positions[row]]
        np.testing.assert_allclose(results.distances[row], distances, atol=1e-3)
        assert (np.diff(results.distances[row]) >= 0).all()
    assert loaded.retrieve(queries[0], 0.3, 0.1).ids
    loaded.searcher.gallery.items.extra["draws"][0] += 1
    assert rcir.load(loaded.save(tmp_path / "written to")).changes() == ["gallery"]


def test_gallery_grows_to_the_same_tensors(run, toy_splits):
    def build(stop):
        return Retriever.build(
            run.encoder(), run.preprocessing, toy_splits.gallery.subset(np.arange(stop))
        )

    grown, whole = build(50), build(70)
    more = toy_splits.gallery.subset(np.arange(50, 70))
    grown.add(more.images, more.ids, more.labels)
    assert len(grown.searcher.gallery.items) == 70
    for name, values in whole.searcher.gallery.items.tensors.items():
        torch.testing.assert_close(
            grown.searcher.gallery.items.tensors[name], values, rtol=1e-3, atol=1e-4
        )


def test_loading_without_its_module_names_the_method(run, toy_splits, tmp_path, monkeypatch):
    built = Retriever.build(run.encoder(), run.preprocessing, toy_splits.gallery)
    built.save(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "tests.toy", None)  # an import fails
    with pytest.raises(InvalidConfig, match=r"tests.toy:Toy.*PYTHONPATH"):
        rcir.load(tmp_path / "saved")


class Plain(Encoder):
    """An encoder whose configuration names another class."""

    def __init__(self, config, channels, size):
        super().__init__(config)
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, images):
        return Embedding(F.normalize(images.flatten(1)[:, :4] + self.anchor))


def test_encoder_that_could_not_be_loaded_is_not_saved(splits, tmp_path):
    encoder = Plain(EncoderConfig("btl"), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery)
    with pytest.raises(InvalidConfig, match="Plain"):
        built.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(InvalidConfig, match="Linear"):
        Retriever.build(torch.nn.Linear(3, 2), Preprocessing(), splits.gallery)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("toy", "unknown.*package.module:Class"),
        ("tests.nothing:Toy", "PYTHONPATH"),
        ("tests.toy:Nothing", "imported"),
        ("tests.toy:ToyOptions", "encoder"),
        (":", "imported"),
    ],
)
def test_name_of_something_else_is_refused(method, word):
    with pytest.raises(InvalidConfig, match=word):
        EncoderConfig(method)
