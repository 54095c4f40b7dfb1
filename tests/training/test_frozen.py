"""Heads on a frozen backbone, which embeds every image once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rcir.data import Augmentation, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.features import FrozenBackbone, frozen_backbone
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from rcir.retrieval.retriever import Retriever
from tests.methods import CERTAIN, OPTIONS, TRAINED
from tests.training.helpers import Stop, equal, same_weights
from training import Change, train
from training.config import override

FEW = OPTIONS | {
    "mc-dropout": {"passes": 3, "dropout": 0.3},
    "hib": {"distance": "mean"},  # by which an image finds itself, however uncertain it is
}
PIXELS = Preprocessing((16, 32), 3)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
# No choice depends on distances, which round otherwise.
ALL_NEGATIVES = MiningConfig("random", "hardest", num_negatives=31, pool=31, scope="batch")


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
def n_embedded(monkeypatch):
    """A list that fills with the numbers of images, not features, in a frozen backbone's passes."""
    seen = []
    forward = FrozenBackbone.forward

    def counted(self, images):
        if images.shape[1:] != self.shape:
            seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(FrozenBackbone, "forward", counted)
    return seen


@pytest.mark.parametrize(
    "method",
    [name if name == "btl" else pytest.param(name, marks=pytest.mark.slow) for name in TRAINED],
)
def test_every_method_learns_on_features_that_are_computed_once(
    method, frozen, checkpoint, n_embedded, tmp_path
):
    config = frozen(method, epochs=1)
    run = train(config)
    splits = load_splits(config.data)
    # One image more, which measures the memory of a forward pass.
    assert sum(n_embedded) - 1 == len(splits.train) + len(splits.validation)

    encoder = run.encoder()
    published = load_file(checkpoint)
    for module in encoder.modules():
        if isinstance(module, FrozenBackbone):
            state = module.backbone.model.state_dict()
            assert all(torch.equal(values, published[name]) for name, values in state.items())
    start = build_encoder(config.encoder, 3, PIXELS.size)
    of_heads = ("head", "layer.", "variance_branch")
    heads = {name for name, _ in start.named_parameters() if any(h in name for h in of_heads)}
    assert heads
    before, after = start.state_dict(), encoder.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in heads)

    # Images are answered by backbone and heads, from the folder alone.
    gallery = splits.gallery.subset(np.arange(40))
    retriever = Retriever.build(encoder, run.preprocessing, gallery, depth=10)
    again = Retriever.load(retriever.save(tmp_path / "retriever"))
    results = again.search(gallery.images[:4])
    assert results.positions[:, 0].tolist() == [0, 1, 2, 3]
    embedding = again.embed(gallery.images[:4])
    assert (embedding.uncertainty is None) == (method in CERTAIN)


@pytest.mark.parametrize(
    ("method", "pooling"),
    [*((method, "gem") for method in TRAINED), ("btl", "avg"), ("btl", "flatten")],
)
def test_features_in_the_place_of_images_give_the_same_embedding(method, pooling, frozen):
    encoder = build_encoder(frozen(method, pooling=pooling).encoder, 3, PIXELS.size)
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
    torch.testing.assert_close(features[:, :, 0, 0], pooled, **CLOSE)
    of_images, of_features = encoder.embed(images), encoder.embed(features)
    for name, values in of_images.tensors.items():
        torch.testing.assert_close(of_features.tensors[name], values, **CLOSE)


def test_dropout_thins_the_features_alone(frozen):
    encoder = build_encoder(frozen("mc-dropout").encoder, 3, PIXELS.size)
    images = torch.rand(4, 3, *PIXELS.size)
    features = frozen_backbone(encoder)(images)
    head = encoder.network.mean_head
    expected = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        mask = torch.rand(features.shape[1:], generator=generator) < 0.7
        with torch.no_grad():
            expected.append(torch.nn.functional.normalize(head(features * mask / 0.7)))
    embedding, expected = encoder.embed(images), torch.stack(expected)
    mean = torch.nn.functional.normalize(expected.mean(0))
    torch.testing.assert_close(embedding.vectors, mean, **CLOSE)
    torch.testing.assert_close(embedding.variance, expected.var(0), **CLOSE)


def test_nothing_below_the_heads_trains_or_changes_its_mode(frozen):
    encoder = build_encoder(frozen().encoder, 3, PIXELS.size).train()
    backbone = frozen_backbone(encoder)
    assert not any(module.training for module in backbone.modules())
    assert not any(weights.requires_grad for weights in backbone.parameters())
    assert encoder.mean_head.training
    before = {name: values.clone() for name, values in backbone.state_dict().items()}
    encoder(torch.rand(4, 3, *PIXELS.size)).vectors.sum().backward()
    assert equal(backbone.state_dict(), before)


def test_an_interrupted_training_continues_without_embedding_again(frozen, n_embedded):
    whole = train(frozen(name="whole"))
    first = sum(n_embedded)
    config = frozen(name="parts")
    with pytest.raises(SystemExit):
        train(config, callback=Stop(1))
    run = train(config)
    assert sum(n_embedded) == first, "runs share the features"
    assert same_weights(run, whole)


def test_training_on_features_is_training_on_images(frozen, monkeypatch):
    """The steps are those with the images embedded anew in each of them."""
    run = train(frozen(name="features", epochs=1, mining=ALL_NEGATIVES))
    for module in ("training.loop", "training.run"):
        monkeypatch.setattr(f"{module}.on_features", lambda config, splits, *_: (config, splits))
    other = train(frozen(name="images", epochs=1, mining=ALL_NEGATIVES)).encoder().state_dict()
    for name, values in run.encoder().state_dict().items():
        torch.testing.assert_close(values, other[name], atol=1e-3, rtol=1e-2)


def test_pfe_is_fitted_on_the_features_of_a_frozen_pretrained_base(frozen, checkpoint):
    options = {"steps": 30, "batch": 32, "base": "pretrained"}
    fixed = {"checkpoint_path": checkpoint, "freeze": True, "options": options}
    run = train(frozen(encoder=EncoderConfig("pfe", "timm:test_resnet", "avg", **fixed)))
    embedding = run.encoder().embed(torch.rand(4, 3, *PIXELS.size))
    assert embedding.vectors.shape == embedding.variance.shape
    backbone = frozen_backbone(run.encoder().of_base)
    published = load_file(checkpoint)
    for name, values in backbone.backbone.model.state_dict().items():
        assert torch.equal(values, published[name])


def test_what_cannot_be_frozen_is_refused(frozen, checkpoint):
    with pytest.raises(InvalidConfig, match="augmentation"):
        frozen(augmentation=Augmentation(flip=True))
    with pytest.raises(InvalidConfig, match="epoch 2"):
        frozen(changes=(Change(2, {"augmentation.flip": True}),))
    config = frozen()
    with pytest.raises(InvalidConfig, match="random"):
        replace(config, encoder=replace(config.encoder, checkpoint_path=None))
    encoder = EncoderConfig("tests.toy:Toy", checkpoint_path=checkpoint, freeze=True)
    with pytest.raises(InvalidConfig, match="freeze"):
        train(frozen(encoder=encoder))


def test_a_pretrained_model_becomes_a_run_without_epochs(frozen):
    run = train(frozen("pretrained"))
    assert (run.finished, run.encoder().config.method) == (True, "pretrained")
    assert not (run.path / "checkpoints").exists()


def test_a_model_of_a_hub_brings_its_preprocessing(tiny):
    encoder = EncoderConfig("btl", "timm:test_resnet", "gem")
    half = (0.5, 0.5, 0.5)
    expected = Preprocessing((160, 160), 3, half, half, "pillow-bilinear", 0.95)
    config = tiny(encoder=encoder)
    assert config.preprocessing == expected
    assert tiny(encoder=encoder, preprocessing=PIXELS).preprocessing == PIXELS
    backbone = {"encoder.backbone": "timm:tf_efficientnet_lite0", "encoder.pooling": "avg"}
    assert override(config, backbone).preprocessing.size == (224, 224)
    assert override(config, {"encoder.dim": 4}).preprocessing == expected
    assert tiny().preprocessing == Preprocessing()
