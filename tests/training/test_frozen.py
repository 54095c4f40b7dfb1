"""Heads on a frozen backbone, which embeds every image once."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from rcir.data import Augmentation, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.features import FrozenBackbone, frozen_backbone
from rcir.errors import InvalidConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save
from tests.methods import CERTAIN, OPTIONS, TRAINED
from training import train
from training.checkpoint import checkpoint_folder
from training.config import override
from training.schedule import Change

FEW = OPTIONS | {
    "mc-dropout": {"passes": 3, "dropout": 0.3},
    "hib": {"distance": "mean"},  # by which an image finds itself, however uncertain it is
}
PIXELS = Preprocessing((16, 32), 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights of a small network whose batch statistics are not those of a new one."""
    torch.manual_seed(3)
    model = timm.create_model("test_resnet")
    model(torch.rand(8, 3, 64, 64))
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(model.state_dict(), path)
    return str(path)


@pytest.fixture
def frozen(tiny, checkpoint):
    """Configurations of trainings with that network frozen."""

    def configured(method="btl", name="frozen", **changes):
        encoder = EncoderConfig(
            method,
            "timm:test_resnet",
            changes.pop("pooling", "gem"),
            dim=8,
            checkpoint_path=checkpoint,
            freeze=True,
            options=FEW.get(method, {}),
        )
        return tiny(name, **({"encoder": encoder, "preprocessing": PIXELS, "epochs": 2} | changes))

    return configured


@pytest.fixture
def embedded(monkeypatch):
    """How many pictures a frozen backbone was given, not features."""
    seen = []
    forward = FrozenBackbone.forward

    def counted(self, images):
        if images.shape[1:] != self.shape:
            seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(FrozenBackbone, "forward", counted)
    return seen


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_learns_on_features_that_are_computed_once(
    method, frozen, checkpoint, embedded, tmp_path
):
    config = frozen(method)
    run = train(config)
    splits = load_splits(config.data)
    assert sum(embedded) == len(splits.train) + len(splits.validation)

    encoder = run.encoder()
    published = load_file(checkpoint)
    for module in encoder.modules():
        if isinstance(module, FrozenBackbone):
            state = module.backbone.model.state_dict()
            assert all(torch.equal(values, published[name]) for name, values in state.items())
    untrained = build_encoder(config.encoder, 3, PIXELS.size)
    of_heads = ("head", "layer.", "variance_branch")
    heads = {name for name, _ in untrained.named_parameters() if any(h in name for h in of_heads)}
    assert heads
    before, after = untrained.state_dict(), encoder.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in heads)

    # Pictures are answered by backbone and heads, from the folder alone.
    gallery = splits.gallery.subset(np.arange(40))
    retriever = Retriever.build(encoder, run.preprocessing, gallery, depth=10)
    again = load(save(retriever, tmp_path / "retriever"))
    found = again.search(gallery.images[:4])
    assert found.positions[:, 0].tolist() == [0, 1, 2, 3]
    embedding = again.embed(gallery.images[:4])
    assert (embedding.uncertainty is None) == (method in CERTAIN)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("pooling", ["gem", "avg", "flatten"])
def test_features_in_the_place_of_pictures_give_the_same_embedding(method, pooling, frozen):
    config = frozen(method, pooling=pooling)
    encoder = build_encoder(config.encoder, 3, PIXELS.size)
    images = torch.rand(5, 3, *PIXELS.size)
    backbone = frozen_backbone(encoder)
    with torch.no_grad():
        maps = backbone.backbone(images)
        pooled = {
            "gem": maps.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3),
            "avg": maps.mean((2, 3)),
            "flatten": maps.flatten(1),
        }[pooling]
    features = backbone(images)
    torch.testing.assert_close(features[:, :, 0, 0], pooled)
    of_images, of_features = encoder.embed(images), encoder.embed(features)
    for name, values in of_images.tensors.items():
        torch.testing.assert_close(of_features.tensors[name], values)


def test_dropout_thins_the_features_alone(frozen):
    config = frozen("mc-dropout")
    encoder = build_encoder(config.encoder, 3, PIXELS.size)
    images = torch.rand(4, 3, *PIXELS.size)
    features = frozen_backbone(encoder)(images)
    head = encoder.network.mean_head
    drawn = encoder.samples(images, torch.Generator())
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        mask = torch.rand(features.shape[1:], generator=generator) < 0.7
        with torch.no_grad():
            expected = torch.nn.functional.normalize(head(features * mask / 0.7))
        torch.testing.assert_close(drawn[number], expected)


def test_nothing_below_the_heads_trains_or_changes_its_mode(frozen):
    encoder = build_encoder(frozen().encoder, 3, PIXELS.size).train()
    backbone = frozen_backbone(encoder)
    assert not any(module.training for module in backbone.modules())
    assert not any(weights.requires_grad for weights in backbone.parameters())
    assert encoder.mean_head.training
    before = {name: values.clone() for name, values in backbone.state_dict().items()}
    encoder(torch.rand(4, 3, *PIXELS.size)).vectors.sum().backward()
    assert all(torch.equal(values, before[name]) for name, values in backbone.state_dict().items())


def test_an_interrupted_training_goes_on_without_embedding_again(frozen, embedded, monkeypatch):
    whole = train(frozen(name="whole"))
    first = sum(embedded)

    def stop(*_arguments, **_options):
        raise KeyboardInterrupt

    config = frozen(name="parts")
    with monkeypatch.context() as patch:
        patch.setattr("training.loop.TrainingWatch.after", stop)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    run = train(config)
    assert sum(embedded) == first, "runs share the features"
    ours, theirs = run.encoder().state_dict(), whole.encoder().state_dict()
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    weights = [
        load_file(checkpoint_folder(each.path, 2) / "model.safetensors") for each in (run, whole)
    ]
    assert all(torch.equal(values, weights[1][name]) for name, values in weights[0].items())


def test_training_on_features_is_training_on_pictures(frozen, monkeypatch):
    """The same steps as with the pictures embedded anew in each of them."""
    run = train(frozen(name="features"))
    for module in ("training.loop", "training.run"):
        monkeypatch.setattr(f"{module}.on_features", lambda config, splits, *_: (config, splits))
    other = train(frozen(name="pictures"))
    ours, theirs = run.encoder().state_dict(), other.encoder().state_dict()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], atol=1e-4, rtol=1e-3)


@pytest.mark.distributed
@pytest.mark.slow
def test_workers_train_the_same_on_features(frozen, ray_cluster):
    alone = train(frozen("deep-ensemble", "alone", micro_batches=2))
    together = train(frozen("deep-ensemble", "together", micro_batches=2, num_workers=2))
    ours, theirs = alone.encoder().state_dict(), together.encoder().state_dict()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], atol=1e-4, rtol=1e-3)


def test_augmentation_is_refused(frozen):
    with pytest.raises(InvalidConfig, match=r"leave augmentation out, or set encoder\.freeze"):
        frozen(augmentation=Augmentation(flip=True))
    with pytest.raises(InvalidConfig, match=r"changes at epoch 2: encoder\.freeze embeds"):
        frozen(changes=(Change(2, {"augmentation.flip": True}),))


def test_a_random_backbone_is_not_frozen(frozen):
    config = frozen()
    with pytest.raises(InvalidConfig, match=r"random without encoder\.pretrained"):
        replace(config, encoder=replace(config.encoder, checkpoint_path=None))


def test_an_encoder_of_which_nothing_trains_is_refused(frozen):
    with pytest.raises(InvalidConfig, match="nothing of the encoder trains: pretrained"):
        train(frozen("pretrained"))


def test_a_method_that_freezes_nothing_is_refused(frozen, checkpoint):
    encoder = EncoderConfig("tests.toy:Toy", checkpoint_path=checkpoint, freeze=True)
    with pytest.raises(InvalidConfig, match=r"tests\.toy:Toy has no backbone that can be frozen"):
        train(frozen(encoder=encoder))


def test_a_model_of_a_hub_brings_its_preprocessing(tiny):
    encoder = EncoderConfig("btl", "timm:test_resnet", "gem")
    half = (0.5, 0.5, 0.5)
    own = Preprocessing((160, 160), 3, half, half, "bilinear", 0.95)
    config = tiny(encoder=encoder)
    assert config.preprocessing == own
    assert tiny(encoder=encoder, preprocessing=PIXELS).preprocessing == PIXELS
    other = override(
        config, {"encoder.backbone": "timm:tf_efficientnet_lite0", "encoder.pooling": "avg"}
    )
    assert (other.preprocessing.size, other.preprocessing.crop) == ((224, 224), 0.875)
    assert override(config, {"encoder.dim": 4}).preprocessing == own
    assert tiny().preprocessing == Preprocessing()
