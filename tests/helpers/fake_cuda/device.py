"""A CUDA device without data: it counts operators and live bytes, and rejects everything that waits for the device."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
BLOCK = 512
"""Allocation granularity of PyTorch's CUDA allocator."""


class _FakeMode(FakeTensorMode):
    # PyTorch's CPU build has no CUDA runtime that could be initialized.
    avoid_device_init = True


class Device(TorchDispatchMode):
    """Runs operators on CUDA tensors without data, and counts them by name and their live bytes. Others run as usual.

    An operator is one kernel or a few; views and allocations are not counted. Operators whose result depends on values
    (`item`, `nonzero`, indexing by a mask) fail, because fake tensors have no values: on a GPU, the host would wait for
    them. Copies to the host are recorded in `waits`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = _FakeMode(allow_non_fake_inputs=True)
        self.operators: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.live, self.peak, self.at_peak = 0, 0, ""
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_on_cuda((args, kwargs))
        if not inputs and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        with self._fake:
            out = func(*args, **kwargs)
        outputs = tensors_on_cuda(out)
        if func.namespace == "aten" and not func.is_view and "empty" not in func.__name__:
            self.operators[func.__name__.partition(".")[0]] += 1
            self.places[running_line()] += 1
        copies_to_host = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if copies_to_host and tensors_on_cuda(args[-1] if len(args) > 1 else args) and not outputs:
            self.waits[f"{func} in {running_line()}"] += 1
        for tensor in outputs:
            self._allocated(tensor.untyped_storage())
        return out

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._storages.add(key)
        self.live += size
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, running_line()
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.live -= size

    def restart(self) -> None:
        """Forget counts and the peak; live tensors stay."""
        for counter in (self.operators, self.places, self.waits):
            counter.clear()
        self.peak = self.live


def tensors_on_cuda(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"]


def running_line() -> str:
    """Return the innermost running line of the program's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        _, own, name = frame.f_code.co_filename.partition("/rlhf_cli/")
        if own:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "libraries"


@contextmanager
def fake_device(capability: tuple[int, int] = (9, 0)) -> Iterator[Device]:
    """Create tensors without data inside the block; those on CUDA are counted."""
    pretended = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        # PyTorch would save the random state of each device.
        "device_count": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
    }
    for name, function in pretended.items():
        setattr(torch.cuda, name, function)
    torch._C._ensureCUDADeviceGuardSet()
    # torch.tensor would allocate on the device, below all modes.
    torch._C._set_only_lift_cpu_tensors(True)
    # The engine would run backward passes in a thread per device, outside of this thread's modes.
    torch.autograd.set_multithreading_enabled(False)
    with Device() as device:
        yield device
