"""Training on a CUDA device, beside training on the CPU.

Losses are compared over a few steps in full precision, in which rounding does not tell.
"""

import json
import shutil
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed
from rcir.encoders.features import frozen_backbone
from rcir.mining import MiningConfig
from tests.methods import MADE_OF_OTHERS, TRAINED, config_of
from tests.training.helpers import (
    CPU,
    assert_close,
    epochs,
    equal,
    logged,
    trainer_of,
    unfinish,
    untrained,
)
from training import OptimizerConfig, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # by torch.compile
]
GPU = torch.device("cuda")
DATA = DataConfig("digits", options={"train": 210, "validation": 100})
# Three steps, which hardly depend on the rounding of their gradients.
FEW_STEPS = {
    "data": DATA,
    "epochs": 1,
    "batch": 70,
    "micro_batches": 2,
    "optimizer": OptimizerConfig(lr=1e-4, schedule="constant"),
}
MINING = {
    "epoch": MiningConfig("random", "hardest", num_negatives=5),
    # All negatives: the same ones, however distances are rounded.
    "batch": MiningConfig("random", "hardest", num_negatives=69, pool=69, scope="batch"),
}
ONLINE = config_of("lam", dim=8, options={"online": True})
TRAINED_AT_ONCE = {
    name: config_of(name, dim=8) for name in TRAINED if name not in MADE_OF_OTHERS
} | {"lam online": ONLINE}
DRAW = ("mc-dropout", "hib", "lam online")  # random numbers on the device, other than on the CPU


@contextmanager
def float32_by(way):
    """Let the GPU compute float32 by "ieee" or by "tf32"."""
    operations = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [operation.fp32_precision for operation in operations]
    try:
        for operation in operations:
            operation.fp32_precision = way
        yield
    finally:
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision


@pytest.fixture
def full_precision():
    """Let the GPU compute float32 without TF32."""
    with float32_by("ieee"):
        yield


def require_close(actual, expected, rtol):
    """Compare all parts of two embeddings."""
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        assert_close(actual.tensors[name].cpu(), values.cpu(), rtol)


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("scope", MINING)
@pytest.mark.parametrize("method", [name for name in TRAINED_AT_ONCE if name not in DRAW])
def test_the_steps_of_an_epoch_are_those_of_the_cpu(method, scope, tiny):
    config = tiny(encoder=TRAINED_AT_ONCE[method], mining=MINING[scope], **FEW_STEPS)
    images = load_splits(DATA).validation.images
    losses, embeddings = [], []
    for device in (CPU, GPU):
        trainer = trainer_of(config, device=device)
        losses += epochs(trainer)
        embeddings.append(embed(trainer.encoder.eval(), config.preprocessing, images))
    assert losses[1]["tuples"] == losses[0]["tuples"]
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=0.01)
    assert embeddings[1].vectors.is_cuda
    require_close(embeddings[1], embeddings[0], rtol=0.01)


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("scope", MINING)
@pytest.mark.parametrize("method", DRAW)
def test_what_is_drawn_on_the_gpu_is_decided_by_the_seed(method, scope, tiny):
    def loss(seed):
        encoder, mining = TRAINED_AT_ONCE[method], MINING[scope]
        trainer = trainer_of(
            tiny(seed=seed, encoder=encoder, mining=mining, **FEW_STEPS), device=GPU
        )
        torch.rand(7, device=GPU)  # what was drawn before does not matter
        (metrics,) = epochs(trainer)
        return metrics["loss"]

    first, again, other = map(loss, (1, 1, 2))
    assert again == pytest.approx(first, rel=1e-4)
    assert abs(other - first) > 10 * abs(again - first)


@pytest.mark.parametrize("method", TRAINED)
def test_training_on_the_gpu_gives_an_encoder_that_the_cpu_reads(method, tiny):
    config = tiny(encoder=config_of(method, dim=8), use_gpu=True, data=DATA, epochs=2)
    encoder = train(config).encoder()
    assert not equal(encoder.state_dict(), untrained(config).state_dict())
    images = load_splits(DATA).validation.images
    on_cpu = embed(encoder, config.preprocessing, images)
    on_gpu = embed(encoder.to(GPU), config.preprocessing, images)
    require_close(on_gpu, on_cpu, rtol=1e-3)


@pytest.mark.parametrize("method", ["btl", "mc-dropout"])
def test_heads_of_a_frozen_backbone_are_trained_on_the_gpu(method, tiny, checkpoint):
    options = {"checkpoint_path": checkpoint, "freeze": True}
    encoder = config_of(method, backbone="timm:test_resnet", pooling="gem", dim=8, **options)
    pixels = Preprocessing((16, 32), 3)
    config = tiny(encoder=encoder, preprocessing=pixels, use_gpu=True, data=DATA, epochs=1)
    trained, start = train(config).encoder(), build_encoder(config.encoder, 3, pixels.size)
    backbones = [frozen_backbone(each).state_dict() for each in (trained, start)]
    assert equal(*backbones)
    assert not equal(trained.state_dict(), start.state_dict())
    images = load_splits(DATA).validation.images
    on_cpu = embed(trained, pixels, images)
    require_close(embed(trained.to(GPU), pixels, images), on_cpu, rtol=1e-3)


@pytest.mark.usefixtures("full_precision")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores.*not enabled:UserWarning")
@pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("cc") is None,
    reason="torch.compile needs a C compiler",
)
def test_compiling_does_not_change_the_losses(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    configured = partial(tiny, encoder=config_of("btl", dim=8), use_gpu=True, **FEW_STEPS)
    runs = [train(configured(f"compile-{on}", compile=on)) for on in (False, True)]
    eager, compiled = ([*logged(run).values()] for run in runs)
    assert compiled == pytest.approx(eager, rel=0.01)


@pytest.mark.parametrize("settings", ["tf32", "bfloat16"])
def test_embedding_is_in_full_precision_whatever_the_settings(settings):
    encoder = build_encoder(EncoderConfig("btl", "resnet50", "gem", dim=64), 3, (64, 64)).to(GPU)
    images = torch.rand(8, 3, 64, 64, device=GPU)
    exact = encoder.embed(images).vectors
    tf32, bfloat16 = settings == "tf32", settings == "bfloat16"
    with float32_by("tf32" if tf32 else "ieee"), torch.autocast("cuda", torch.bfloat16, bfloat16):
        vectors = encoder.embed(images).vectors
        with torch.no_grad():
            rough = encoder.eval()(images).vectors
    assert_close(vectors, exact, rtol=1e-5)
    if bfloat16 or torch.cuda.get_device_capability() >= (8, 0):  # older ones have no TF32
        assert (rough - exact).norm() > 1e-4 * exact.norm()


def workers(tiny, name, **changes):
    """Training on Ray's workers in bfloat16, with batch normalisation."""
    return tiny(
        name,
        **{
            **FEW_STEPS,
            **{"use_gpu": True, "precision": "bfloat16", "num_workers": 1, "epochs": 2},
            "preprocessing": Preprocessing(size=(32, 32), channels=3),
            "encoder": EncoderConfig("btl", "resnet50", "gem", dim=16),
            "mining": MINING["batch"],
            **changes,
        },
    )


@pytest.mark.distributed
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_with_a_gpu_trains_in_bfloat16_and_continues(tiny):
    whole = train(workers(tiny, "whole"))
    half = train(workers(tiny, "half", epochs=1))
    unfinish(half.path)
    stored = json.loads((half.path / "run.json").read_text())
    stored["config"]["epochs"] = 2
    (half.path / "run.json").write_text(json.dumps(stored))
    continued = logged(train(workers(tiny, "half")))
    assert continued.keys() == {1, 2}
    assert [*continued.values()] == pytest.approx([*logged(whole).values()], rel=0.05)
