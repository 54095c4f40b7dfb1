"""Full precision: of several threads, beside the caller's settings, in whatever needs it."""

import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rcir.data.relevance import SameLabel
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig
from rcir.index import nearest_others
from rcir.mining import MiningConfig, mine
from rcir.torch_settings import full_precision

PRODUCTS = ("conv2d", "linear", "addmm", "_euclidean_dist", "_cdist_forward")


def operations():
    backends = torch.backends
    return (
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    )


def precisions():
    return [operation.fp32_precision for operation in operations()]


@pytest.fixture
def tf32():
    """Settings of a caller, by the newer names, which contradict the older ones."""
    before = precisions()
    for operation in operations():
        operation.fp32_precision = "tf32"
    yield precisions()
    for operation, precision in zip(operations(), before, strict=True):
        operation.fp32_precision = precision


class Products(TorchDispatchMode):
    """The precision in force at every product."""

    def __init__(self):
        super().__init__()
        self.precisions = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in PRODUCTS:
            self.precisions += precisions()
        return operation(*args, **(kwargs or {}))


ENCODER = build_encoder(EncoderConfig("deterministic"), 1, (8, 16))


def embed():
    ENCODER.embed(torch.zeros(2, 1, 8, 16))


def mine_semi_hard():
    cache, labels = torch.randn(60, 8), np.arange(60) % 5
    config = MiningConfig("nearest", "semi-hard", num_negatives=2)
    mine(cache, SameLabel(labels), torch.arange(60), config, torch.Generator())


def search_others():
    nearest_others(torch.randn(60, 8), 3)


@pytest.mark.parametrize("work", [embed, mine_semi_hard, search_others])
def test_products_are_in_full_precision_and_settings_are_restored(work, tf32):
    with Products() as products:
        work()
    assert products.precisions
    assert set(products.precisions) == {"ieee"}
    assert precisions() == tf32 != ["ieee"] * 6


def test_settings_hold_until_the_last_of_several_threads_leaves(tf32):
    inside, leave, others = threading.Event(), threading.Event(), []

    def stay():
        with full_precision():
            inside.set()
            leave.wait(60)
            others.append(precisions())

    thread = threading.Thread(target=stay)
    with full_precision():
        thread.start()
        assert inside.wait(60)
    assert precisions() == ["ieee"] * 6
    leave.set()
    thread.join()
    assert others == [["ieee"] * 6]
    assert precisions() == tf32


def test_older_settings_of_a_caller_are_restored():
    before = precisions()
    torch.set_float32_matmul_precision("medium")
    caller = precisions()
    try:
        with full_precision():
            assert precisions() == ["ieee"] * 6
        assert torch.get_float32_matmul_precision() == "medium"
        assert precisions() == caller != ["ieee"] * 6
    finally:
        torch.set_float32_matmul_precision("highest")
        for operation, precision in zip(operations(), before, strict=True):
            operation.fp32_precision = precision


@pytest.mark.usefixtures("tf32")
def test_older_settings_can_be_read_and_changed_inside():
    with full_precision():
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
        with torch.backends.cudnn.flags(deterministic=True):
            pass


@pytest.mark.parametrize("work", [embed, mine_semi_hard, search_others])
def test_an_override_below_torch_is_refused(work, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(InvalidConfig, match="unset NVIDIA_TF32_OVERRIDE"):
        work()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    work()
