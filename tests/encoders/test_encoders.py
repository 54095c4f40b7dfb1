"""Properties of every encoder: unit length, batches, precision, mode, training, fingerprint."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rcir.encoders import METHODS, EncoderConfig, build_encoder
from rcir.encoders.base import stored_encoder
from rcir.errors import InvalidConfig
from tests.encoders import small
from tests.encoders.small import as_tuples, pictures
from tests.methods import CERTAIN, MADE_OF_OTHERS, TRAINED, config_of

OF_ANY_LENGTH = ("tripreg", "hib")  # vectors


def build(method, seed=0, **options):
    return small.build(config_of(method, options=options), seed=seed)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in sorted(METHODS)),
        *(("deep-ensemble", {"combination": mode}) for mode in ("aligned", "reference")),
        ("btl", {"scaled": True}),
        *(("hib", {"components": components}) for components in (0, 2)),
    ],
    ids=str,
)
def test_an_embedding_depends_neither_on_its_batch_nor_on_the_random_state(method, options):
    encoder, images = build(method, **options), pictures()
    whole = encoder.embed(images).tensors
    if method not in OF_ANY_LENGTH and options.get("combination") != "reference":
        np.testing.assert_allclose(whole["vectors"].norm(dim=1), 1, atol=1e-5)
    certain = method in (*CERTAIN, "lam") or options.get("components") == 0
    assert ("uncertainty" in whole) != certain
    torch.manual_seed(5)
    again, alone = encoder.embed(images).tensors, encoder.embed(images[2:3]).tensors
    assert whole.keys() == again.keys() == alone.keys()
    for name, values in whole.items():
        assert torch.equal(values, again[name])
        torch.testing.assert_close(alone[name], values[2:3], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_copies_of_an_encoder_that_embedded_embed_the_same(method):
    encoder, loaded = build(method), build(method, seed=1)
    if method == "lam":
        encoder.prior_precision.fill_(1.0)
    expected = encoder.embed(pictures()).tensors
    loaded.load_state_dict(encoder.state_dict())
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder)), loaded):
        torch.testing.assert_close(other.embed(pictures()).tensors, expected, atol=0, rtol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_threads_that_embed_at_once_get_what_one_thread_gets(method):
    encoder = build(method).train()
    if method == "lam":
        encoder.prior_precision.fill_(1.0)
    batches = [pictures()[:1], pictures()[:3], pictures()] * 8
    expected = [copy.deepcopy(encoder).embed(images) for images in batches[:3]] * 8
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(encoder.embed, batches))
    for result, alone in zip(results, expected, strict=True):
        torch.testing.assert_close(result.tensors, alone.tensors, atol=1e-6, rtol=1e-5)
    assert all(module.training for module in encoder.modules())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_draws_do_not_depend_on_the_default_device(method):
    encoder, images = build(method), pictures()
    if method == "lam":
        encoder.prior_precision.fill_(1.0)

    def draws(encoder):
        embedding = encoder.embed(images)
        parts = list(embedding.tensors.values())
        if encoder.draws:
            candidates = embedding.vectors.expand(len(images), *embedding.vectors.shape)
            parts.append(encoder.draw_distances(embedding, candidates))
        if encoder.reranks:
            parts.append(encoder.rerank(embedding[:2], embedding))
        return parts

    expected = draws(copy.deepcopy(encoder))
    with torch.device("meta"):
        torch.testing.assert_close(draws(encoder), expected, atol=0, rtol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_autocast_of_the_caller_does_not_change_embeddings(method):
    encoder, images = build(method), pictures()
    alone = encoder.embed(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoder.embed(images).vectors, alone.vectors)
        # Afterwards, the precision of the caller is as before.
        assert torch.is_autocast_enabled("cpu")
        assert not torch.equal(encoder.eval()(images).vectors.float(), alone.vectors)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_embedding_changes_neither_mode_nor_weights_and_keeps_no_graph(method):
    for training in (True, False):
        encoder = build(method).train(training)
        before = copy.deepcopy(encoder.state_dict())
        embedding = encoder.embed(pictures())
        assert all(module.training == training for module in encoder.modules())
        assert not embedding.vectors.requires_grad
        for name, values in encoder.state_dict().items():
            assert torch.equal(values, before[name])


@pytest.mark.parametrize("method", [name for name in TRAINED if name not in MADE_OF_OTHERS])
def test_training_reaches_every_weight(method):
    encoder = build(method, **({"classes": 5} if method == "norm-softmax" else {})).train()
    optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
    options = encoder.LossOptions()
    # Behind a last layer that starts at zero, gradients start one step later.
    for _ in range(2):
        optimizer.zero_grad()
        embedding = encoder(pictures(8))  # two anchors, their positives, two negatives each
        if encoder.by_label:
            losses = encoder.label_loss(embedding, torch.arange(8) % 5, options)
        else:
            losses = encoder.loss(as_tuples(embedding, negatives=2), options)
        losses.sum().backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in encoder.parameters())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_fingerprint_changes_with_one_weight_and_nothing_else(method):
    encoder = build(method)
    first = encoder.fingerprint()
    encoder.embed(pictures())
    assert encoder.fingerprint() == first == build(method).fingerprint()
    assert build(method, seed=1).fingerprint() != first
    rounded = copy.deepcopy(encoder).bfloat16()
    assert rounded.fingerprint() == build(method).bfloat16().fingerprint() != first
    assert rounded.weights_digest() != encoder.weights_digest()
    with torch.no_grad():
        next(encoder.parameters()).view(-1)[-1].add_(1e-3)
    assert encoder.fingerprint() != first


def test_the_fingerprint_changes_with_options_and_the_revision_of_a_method(monkeypatch):
    encoder = build("deterministic")
    first = encoder.fingerprint()
    assert build("deterministic", unit=False).fingerprint() != first
    monkeypatch.setattr(type(encoder), "revision", 1)
    assert encoder.fingerprint() != first


@pytest.mark.parametrize("method", ["btl", "vmf", "tripreg"])
def test_the_fingerprint_tells_activations_apart(method):
    relu, leaky = build(method, activation="relu"), build(method)
    assert relu.weights_digest() == leaky.weights_digest()
    assert relu.fingerprint() != leaky.fingerprint()


@pytest.mark.parametrize(
    ("method", "option", "earlier"),
    [
        *((method, "activation", "relu") for method in ("btl", "vmf", "tripreg")),
        ("lam", "clamp", "use"),
    ],
)
def test_the_fingerprint_is_that_from_before_an_option_existed(method, option, earlier):
    encoder = build(method, **{option: earlier})
    now = encoder.fingerprint()
    assert stored_encoder({"method": method, "options": {}})["options"] == {option: earlier}
    encoder.config.options.pop(option)
    assert encoder.fingerprint() == now


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_the_fingerprint_changes_with_hooks_on_any_module(kind):
    encoder = build("btl")
    first = encoder.fingerprint()
    handle = getattr(list(encoder.modules())[-1], kind)(lambda *_: None)
    assert encoder.fingerprint() != first
    handle.remove()
    assert encoder.fingerprint() == first


@pytest.mark.parametrize(
    "options",
    [
        {"method": "bayes"},
        {"backbone": "resnet18"},
        {"backbone": "mnist-cnn", "pretrained": True},
        {"backbone": "resnet50"},  # of grey images
        {"backbone": "cifar-cnn"},  # of images of 8 x 16 pixels
        *({"method": method, "dim": 1} for method in ("btl", "vmf", "deterministic", "lam")),
        {"method": "tripreg", "dim": 1, "options": {"unit": True}},
        {"method": "hib", "dim": 0},
        {"pooling": "max"},
        {"pretrained": "IMAGENET1K_V3"},
        {"pretrained": True, "checkpoint_path": "a.safetensors"},
    ],
    ids=str,
)
def test_invalid_configurations_are_refused(options):
    with pytest.raises(InvalidConfig):
        build_encoder(EncoderConfig(**options), 1, (8, 16))


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("btl", "variance_hidden", 0),
        ("btl", "distance", "far"),
        ("vmf", "concentration_hidden", 0),
        ("vmf", "distance", "far"),
        ("tripreg", "variance_hidden", 0),
        ("mc-dropout", "passes", 1),
        ("mc-dropout", "dropout", 0.0),
        ("mc-dropout", "dropout", 1.0),
        ("deep-ensemble", "members", 1),
        ("deep-ensemble", "combination", "mean"),
        ("hib", "components", -1),
        ("hib", "components", 3),  # 8 samples
        ("hib", "samples", 0),
        ("hib", "distance", "expected"),
        ("lam", "hessian", "cosine"),
        ("lam", "variant", "fix"),
        ("lam", "negatives_weight", -1.0),
        ("lam", "negatives_weight", "Auto"),
        ("lam", "scale", 0.0),
        ("lam", "initial", 0.0),
        ("lam", "prior_precision", float("nan")),
        ("lam", "memory", 1.0),
        ("lam", "passes", 1),
        ("pfe", "base", "btl"),
        ("pfe", "base", "norm-softmax"),  # without weights
        ("pfe", "base_options", 3),
        ("pfe", "distance", "cosine"),
        ("pfe", "steps", 0),
        ("pfe", "samples_per_class", 1),
        ("pfe", "batch", 6),
        ("pfe", "lr", 0.0),
    ],
)
def test_invalid_options_are_refused(method, name, value):
    with pytest.raises(InvalidConfig, match=name):
        EncoderConfig(method, options={name: value})
