"""A method of somebody's own (`tests/toy.py`), by its import path alone, from its training on."""

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
from rcir.encoders import Encoder, EncoderConfig, build_encoder
from rcir.errors import InvalidConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import save
from tests.toy import Toy
from tests.training.test_continued import equal, unfinish
from training import Change, TrainingConfig, train
from tuning.space import check_space, with_values

TOY = "tests.toy:Toy"
PARTS = {"train": 200, "validation": 100, "gallery": 120, "tuning": 60, "test": 60}
DATA = DataConfig("digits", options={**PARTS, "calibration": 150})


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return train(config)


def test_it_is_trained_by_its_own_loss_mining_and_hooks(run, config):
    encoder = run.encoder()
    assert isinstance(encoder, Toy)
    assert (config.mining.positive, config.mining.negatives) == ("random", "hardest")
    assert config.at(2).loss == {"temperature": 0.05}
    assert encoder.steps == encoder.steps.new_tensor(math.ceil(200 / 32) * run_epoch(run))
    images = load_splits(DATA).train
    embedding = encoder.embed(run.preprocessing(images.images))
    # What is fitted after training: the mean concentration of the training images is 1.
    assert embedding.extra["concentration"].mean().item() == pytest.approx(1, rel=1e-4)


def run_epoch(run):
    """The epoch whose weights were chosen."""
    from training.checkpoint import best_epoch

    return best_epoch(run.path)


def test_it_continues_where_it_was_interrupted(run, config):
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


def test_its_options_are_swept_and_those_of_others_refused(config):
    space = {"encoder.options.width": {"uniform": [8, 16]}, "loss.temperature": {"choice": [0.1]}}
    check_space(config, space)
    assert with_values(config, {"encoder.options.width": 9}).encoder.options == {"width": 9}
    base = TrainingConfig("base", loss={"kl_scale": 1e-4})
    with pytest.raises(InvalidConfig, match=r"no option kl_scale; there are temperature"):
        with_values(base, {"encoder.method": TOY})
    found = with_values(TrainingConfig("base"), {"encoder.method": TOY})
    assert (found.loss, found.mining.negatives) == ({"temperature": 0.1}, "hardest")
    for options in ({"members": 3}, {"variance_hidden": 8}):
        with pytest.raises(InvalidConfig, match="there are width"):
            EncoderConfig(TOY, options=options)


def test_it_is_calibrated_stored_and_loaded_with_all_that_it_states(run, tmp_path, tracking_uri):
    outcome = calibrate(CalibrationConfig(str(run.path), str(tmp_path / "out"), alphas=(0.3,)))
    loaded = rcir.load(outcome.folder)
    assert isinstance(loaded.encoder, Toy)
    assert sorted(loaded.items.extra) == ["concentration", "draws"]
    splits = load_splits(DATA)
    queries, gallery = splits.test.images[:5], loaded.items
    found = loaded.search(queries)
    vectors = loaded.encoder.embed(loaded.preprocessing(queries)).vectors
    # Its own distances decide: to the mean of the distances to all draws, by brute force.
    for row, vector in enumerate(vectors.numpy()):
        draws = gallery.extra["draws"].numpy()
        own = np.sqrt(((draws - vector) ** 2).sum(2)).mean(1)
        np.testing.assert_allclose(found.distances[row], own[found.positions[row]], rtol=1e-5)
        assert (np.diff(found.distances[row]) >= 0).all()
    answer = loaded.retrieve(splits.test.images[0], 0.3, 0.1)
    assert answer.ids


def test_it_grows_with_the_gallery(run, tmp_path):
    splits = load_splits(DATA)
    built = Retriever.build(run.encoder(), run.preprocessing, splits.gallery.subset(np.arange(50)))
    more = splits.gallery.subset(np.arange(50, 70))
    built.add(more.images, more.ids, more.labels)
    whole = Retriever.build(run.encoder(), run.preprocessing, splits.gallery.subset(np.arange(70)))
    for name, values in whole.items.tensors.items():
        torch.testing.assert_close(built.items.tensors[name], values)
    assert len(built.items) == 70


def test_where_its_module_is_absent_it_is_refused_by_name(run, tmp_path, monkeypatch):
    splits = load_splits(DATA)
    save(Retriever.build(run.encoder(), run.preprocessing, splits.gallery), tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "tests.toy", None)  # as where there is none
    with pytest.raises(InvalidConfig, match=r"'tests.toy:Toy' cannot be imported .*PYTHONPATH"):
        rcir.load(tmp_path / "saved")


class Plain(Encoder):
    """Not named by its configuration."""

    def __init__(self, config, channels, size):
        super().__init__(config)
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, images):
        return Embedding(F.normalize(images.flatten(1)[:, :4] + self.anchor))


def test_an_encoder_that_could_not_be_loaded_is_not_saved(splits, tmp_path):
    built = Retriever.build(
        Plain(EncoderConfig("btl"), 1, (8, 16)), Preprocessing(), splits.gallery
    )
    with pytest.raises(InvalidConfig, match=r'says btl.*EncoderConfig\(".*Plain"'):
        save(built, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_plain_network_is_no_encoder(splits):
    with pytest.raises(InvalidConfig, match=r"the encoder is a Linear; .*subclass"):
        Retriever.build(torch.nn.Linear(3, 2), Preprocessing(), splits.gallery)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("toy", "is unknown; choose one of deterministic, .*package.module:Class"),
        ("tests.nothing:Toy", "cannot be imported .*PYTHONPATH"),
        ("tests.toy:Nothing", "cannot be imported"),
        ("tests.toy:ToyOptions", "is no encoder"),
        (":", "cannot be imported"),
    ],
)
def test_what_names_no_encoder_is_refused(method, message):
    with pytest.raises(InvalidConfig, match=message):
        EncoderConfig(method)


def test_it_is_built_like_any_other():
    assert isinstance(build_encoder(EncoderConfig(TOY, dim=4), 1, (8, 16)), Toy)
