"""Training on a CUDA device."""

import json

import pytest
import torch

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from training import OptimizerConfig, TrainingConfig, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = DataConfig("digits", options={"train": 400, "validation": 200})


@pytest.mark.parametrize("method", ["deterministic", "mc-dropout", "btl"])
def test_training_on_the_gpu_gives_an_encoder_that_the_cpu_reads(method, tmp_path):
    options = {"passes": 4} if method == "mc-dropout" else {}
    config = TrainingConfig(
        name=method,
        storage=str(tmp_path),
        epochs=2,
        use_gpu=True,
        data=TINY,
        encoder=EncoderConfig(method, options=options),
    )
    encoder = train(config).encoder()
    images = load_splits(TINY).validation.images
    on_cpu = embed(encoder, config.preprocessing, images)
    on_gpu = embed(encoder.cuda(), config.preprocessing, images)
    torch.testing.assert_close(on_gpu.vectors.cpu(), on_cpu.vectors, atol=1e-4, rtol=1e-3)


@pytest.mark.distributed
def test_a_worker_with_a_gpu_trains_in_bfloat16_and_continues(tmp_path, ray_cluster):
    """ResNet-50 with batch normalisation, stopped after its first epoch of two."""

    def config(name, **changes):
        return TrainingConfig(
            **{
                **{"name": name, "storage": str(tmp_path), "use_gpu": True, "epochs": 2},
                **{"micro_batches": 2, "precision": "bfloat16", "num_workers": 1, "data": TINY},
                "preprocessing": Preprocessing(size=(32, 32), channels=3),
                "encoder": EncoderConfig("btl", "resnet50", "gem", dim=16),
                "optimizer": OptimizerConfig(lr=1e-4, schedule="constant"),
                **changes,
            }
        )

    whole = train(config("whole"))
    half = train(config("half", epochs=1))
    stored = json.loads((half.path / "run.json").read_text())
    stored["config"]["epochs"] = 2
    (half.path / "run.json").write_text(json.dumps(stored | {"finished": False}))
    continued = train(config("half")).encoder().state_dict()
    for name, values in whole.encoder().state_dict().items():
        torch.testing.assert_close(continued[name], values, rtol=0.05, atol=0.01)
