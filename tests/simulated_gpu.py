"""A device that computes on the CPU and refuses what a GPU refuses.

Its tensors hold real numbers, so that results can be compared with those of the CPU, and they do
not mix with tensors of the CPU. Every place at which a GPU would make the CPU wait is counted. It
is a Python implementation of PyTorch's backend for devices of others (PrivateUse1), which belongs
into a process of its own: import it before the first backward pass.

    with simulated():
        encoder.to(DEVICE)(images.to(DEVICE)).vectors.sum().backward()
        assert not waits.in_backward
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(str(ROOT / name) for name in ("rcir", "training"))
aten = torch.ops.aten
# Their indices may be on the CPU, from where a GPU copies them.
INDEXING = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    aten._index_put_impl_.default,
}
# With all pointwise operations, they take a number (a tensor without dimensions) from the CPU.
TAKE_NUMBERS = {
    *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
    *(aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor),
}
# The shape of their result, or what Python does next, depends on values.
WAITING = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.bincount.default, aten._linalg_svd.default),
}


class _Module(backend_registration._DummyBackendModule):
    """What `torch.simulated` offers; random numbers are those of the CPU."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)


backend_registration._setup_privateuseone_for_python_backend("simulated", _Module())
DEVICE = torch.device("simulated", 0)
CPU = torch.device("cpu")


def _autocast(operation):
    """Make an operation run in the precision that autocast asks for."""

    def run(*args):
        dtype = torch.get_autocast_dtype(DEVICE.type)
        with torch.autocast(DEVICE.type, enabled=False):
            args = pytree.tree_map_only(torch.Tensor, lambda each: each.to(dtype), args)
            return operation(*args)

    return run


_every = torch.library.Library("_", "IMPL")
_every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_some = torch.library.Library("aten", "IMPL")
for _operation in (aten.conv2d.default, aten.linear.default, aten.matmul.default):
    _some.impl(_operation, _autocast(_operation), "AutocastPrivateUse1")


class SimulatedTensor(torch.Tensor):
    """A tensor on the device; `values` are its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, values):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _dispatch(operation, args, kwargs or {})


class Waits:
    """Counts how often the CPU waited for the device, by the line of the project that waited."""

    def __init__(self):
        self.lines = Counter()
        self.in_backward = Counter()
        self._backward = False  # whichever thread computes gradients

    def clear(self):
        self.lines.clear()
        self.in_backward.clear()

    def add(self):
        line = _line_of_project()
        self.lines[line] += 1
        if self._backward:
            self.in_backward[line] += 1

    @contextmanager
    def watching_backward(self):
        """Notice which waits are within `Tensor.backward`."""
        backward = torch.Tensor.backward

        def watched(*args, **kwargs):
            self._backward = True
            try:
                return backward(*args, **kwargs)
            finally:
                self._backward = False

        with mock.patch.object(torch.Tensor, "backward", watched):
            yield


waits = Waits()


class _Mode(TorchDispatchMode):
    """Sends what makes tensors from nothing to the device that is asked for."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _dispatch(operation, args, kwargs or {})


@contextmanager
def simulated():
    """Make the device available, and count `waits` from 0 on."""
    before = torch._C._only_lift_cpu_tensors()
    # Otherwise torch.tensor(..., device=DEVICE) would write to memory that the device has not.
    torch._C._set_only_lift_cpu_tensors(True)
    waits.clear()
    try:
        # Inference mode concerns no device, and would hand over operations before they are split.
        with mock.patch("torch.inference_mode", torch.no_grad), waits.watching_backward(), _Mode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def on_cpu(tensor):
    """The numbers of a tensor, of whichever device, without a wait."""
    return tensor.detach().values if isinstance(tensor, SimulatedTensor) else tensor.detach()


def _dispatch(operation, args, kwargs):
    """Run an operation on the numbers, once it is known that a GPU would run it."""
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    on_device = [v for v in tensors if isinstance(v, SimulatedTensor)]
    device = kwargs.get("device") or (DEVICE if on_device else CPU)
    if on_device or device == DEVICE:
        _refuse_mixtures(operation, args, kwargs, tensors, device)
        if _waits_for_values(operation, args, kwargs, on_device, device):
            waits.add()
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    with torch.no_grad():
        values = operation(*pytree.tree_map(_values, args), **pytree.tree_map(_values, kwargs))
    if operation is aten.copy_.default:
        return args[0]
    if device != DEVICE:
        # A copy to the CPU shares no memory with what it was copied from.
        return values.clone() if on_device and values is on_device[0].values else values
    written = {id(v.values): v for v in on_device} if operation._schema.is_mutable else {}
    return pytree.tree_map_only(
        torch.Tensor,
        lambda v: written[id(v)] if id(v) in written else SimulatedTensor(v),
        values,
    )


def _refuse_mixtures(operation, args, kwargs, tensors, device):
    """Raise `RuntimeError` for tensors of which a GPU would take some and not others."""
    if kwargs.get("generator") is not None and device == DEVICE:
        raise RuntimeError(f"{operation} on the device draws from a generator of the CPU")
    if operation in (aten._to_copy.default, aten.copy_.default):
        return
    indices = args[1] if operation in INDEXING else []
    if indices and not isinstance(args[0], SimulatedTensor):
        raise RuntimeError(f"{operation} of a tensor on the CPU has indices on the device")
    numbers = torch.Tag.pointwise in operation.tags or operation in TAKE_NUMBERS
    for each in tensors:
        allowed = any(each is index for index in indices) or (numbers and each.ndim == 0)
        if not isinstance(each, SimulatedTensor) and not allowed:
            raise RuntimeError(f"{operation} mixes tensors of the CPU and of the device")


def _waits_for_values(operation, args, kwargs, on_device, device):
    """Return whether the CPU waits until the device has computed this, or copied its input."""
    if operation is aten._to_copy.default:
        to_device = not on_device and device == DEVICE
        return (to_device and not kwargs.get("non_blocking")) or (on_device and device != DEVICE)
    if operation is aten.copy_.default:
        target, source = (isinstance(each, SimulatedTensor) for each in args[:2])
        return (target and not source and not any(args[2:])) or (source and not target)
    if operation in INDEXING:
        used = [index for index in args[1] if index is not None]
        masks = any(index.dtype == torch.bool for index in used)
        if masks and len(args) > 2 and args[2].ndim == 0 and not any(args[3:4]):
            masks = False  # the mask is filled with one number
        return masks or not all(isinstance(index, SimulatedTensor) for index in used)
    if operation is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return operation in WAITING


def _values(each):
    return each.values if isinstance(each, SimulatedTensor) else each


def _line_of_project():
    """The innermost line of rcir or training that is being run."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PACKAGES):
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}: {frame.line}"
    return "no line of the project"
