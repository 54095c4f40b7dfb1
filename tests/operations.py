"""The operations that PyTorch computes: on a GPU, about a kernel each."""

from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"lift_fresh", "_local_scalar_dense"}  # numbers to a device, and from it


class Operations(TorchDispatchMode):
    """Names of the operations inside the block, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))
