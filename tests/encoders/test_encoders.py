import copy
import subprocess
import sys

import numpy as np
import pytest
import torch

from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig

METHODS = ("deterministic", "mc-dropout", "deep-ensemble", "btl", "pfe")
FEW = {"mc-dropout": {"passes": 4}, "deep-ensemble": {"members": 3}}


def build(method, seed=0, channels=1, size=(8, 16), **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = EncoderConfig(method, options=FEW.get(method, {}) | options)
        return build_encoder(config, channels, size)


def pictures(n=6, channels=1, size=(8, 16)):
    return torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_have_unit_length(method):
    mean = build(method).embed(pictures()).vectors
    np.testing.assert_allclose(mean.norm(dim=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in METHODS),
        *(("deep-ensemble", {"combination": mode}) for mode in ("aligned", "reference")),
        ("btl", {"scaled": True}),
    ],
)
def test_an_image_alone_is_embedded_as_in_a_batch_and_again_the_same(method, options):
    encoder, images = build(method, **options), pictures()
    whole = encoder.embed(images)
    again = encoder.embed(images)
    for part in ("vectors", "variance", "uncertainty"):
        values = getattr(whole, part)
        if values is None:
            assert method == "deterministic"
            continue
        assert torch.equal(values, getattr(again, part))
        for row in range(len(images)):
            alone = getattr(encoder.embed(images[row : row + 1]), part)
            torch.testing.assert_close(alone, values[row : row + 1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_precision_changes_no_embedding(method):
    encoder, images = build(method), pictures()
    alone = encoder.embed(images)
    samples = encoder.samples(images, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoder.embed(images).vectors, alone.vectors)
        again = encoder.samples(images, torch.Generator().manual_seed(0))
        assert samples is again is None or torch.equal(samples, again)
        # Outside of it the caller's precision is as it was.
        assert torch.is_autocast_enabled("cpu")
        assert not torch.equal(encoder.eval()(images).vectors.float(), alone.vectors)


CALLERS = (
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
)
ASKED = """
import torch
from rcir.encoders import EncoderConfig, build_encoder

def state():
    known = torch.backends
    found = [known, known.cuda.matmul, known.cudnn.conv, known.mkldnn.matmul, known.mkldnn.conv]
    precisions = [each.fp32_precision for each in found]
    try:
        return [*precisions, torch.get_float32_matmul_precision(), known.cudnn.allow_tf32]
    except RuntimeError:  # some were set by the newer names
        return precisions

encoder = build_encoder(EncoderConfig("deterministic", dim=64), 1, (8, 16))
images = torch.rand(32, 1, 8, 16)
alone = encoder.embed(images).vectors
CALLER
before, inside = state(), []
handle = next(encoder.children()).register_forward_hook(lambda *_: inside.append(state()[1:5]))
assert torch.equal(encoder.embed(images).vectors, alone)
assert inside == [["ieee"] * 4], inside
assert state() == before, (before, state())
try:
    encoder.embed(torch.zeros(1, 3, 8, 16))  # too many channels
except RuntimeError:
    assert state() == before
else:
    raise AssertionError("no error")
"""


@pytest.mark.slow
@pytest.mark.parametrize("caller", CALLERS)
def test_no_setting_of_precision_changes_an_embedding_and_all_are_left_as_they_were(caller):
    """In a process of its own: such settings are of the whole process."""
    code = ASKED.replace("CALLER", caller)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_embedding_changes_neither_mode_nor_weights_and_keeps_no_graph(method, training):
    encoder = build(method).train(training)
    before = copy.deepcopy(encoder.state_dict())
    embedding = encoder.embed(pictures())
    assert encoder.training == training
    assert all(module.training == training for module in encoder.modules())
    assert not embedding.vectors.requires_grad
    for name, values in encoder.state_dict().items():
        assert torch.equal(values, before[name])


@pytest.mark.parametrize("method", METHODS[:-1])  # pfe has none that a loop trains
def test_a_training_pass_reaches_every_weight(method):
    encoder = build(method).train()
    embedding = encoder(pictures())
    loss = embedding.vectors.square().mul(torch.arange(embedding.vectors.shape[1])).sum()
    if method == "btl":
        loss = loss + embedding.variance.sum()
        # Behind the last layer, which starts at zero, gradients start one step later.
        encoder.variance_head.layers[-1].weight.data.fill_(0.1)
        loss = loss + encoder(pictures()).variance.sum()
    loss.backward()
    assert all((p.grad is not None) and p.grad.abs().sum() > 0 for p in encoder.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_the_fingerprint_sees_one_changed_weight_and_nothing_else(method):
    encoder = build(method)
    first = encoder.fingerprint()
    encoder.embed(pictures())
    assert encoder.fingerprint() == first == build(method).fingerprint()
    assert build(method, seed=1).fingerprint() != first
    with torch.no_grad():
        next(encoder.parameters()).view(-1)[-1].add_(1e-3)
    assert encoder.fingerprint() != first


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_the_fingerprint_sees_hooks_on_any_module(kind):
    encoder = build("btl")
    first = encoder.fingerprint()
    handle = getattr(list(encoder.modules())[-1], kind)(lambda *_: None)
    assert encoder.fingerprint() != first
    handle.remove()
    assert encoder.fingerprint() == first


def test_the_fingerprint_sees_the_configuration():
    assert build("btl").fingerprint() != build("btl", passes=7).fingerprint()


@pytest.mark.parametrize(
    "options",
    [
        {"method": "bayes"},
        {"backbone": "resnet18"},
        {"backbone": "mnist-cnn", "pretrained": True},
        {"backbone": "resnet50"},  # of grey images
        {"backbone": "cifar-cnn"},  # of images of 8 x 16 pixels
        {"dim": 1},
        {"pooling": "max"},
        {"pretrained": "IMAGENET1K_V3"},
        {"options": {"variance_hidden": 0}},
        {"options": {"passes": 1}},
        {"options": {"distance": "far"}},
        {"method": "mc-dropout", "options": {"passes": 1}},
        {"method": "mc-dropout", "options": {"dropout": 0.0}},
        {"method": "mc-dropout", "options": {"dropout": 1.0}},
        {"method": "deep-ensemble", "options": {"members": 1}},
        {"method": "deep-ensemble", "options": {"combination": "mean"}},
    ],
    ids=str,
)
def test_configurations_that_do_not_exist_are_refused(options):
    with pytest.raises(InvalidConfig):
        build_encoder(EncoderConfig(**options), 1, (8, 16))
