"""Compiles Triton kernels for a GPU that is not here, wherever code would launch them.

    python compiling.py sm_90 [PART_OF_A_NAME]...

Prints a JSON line for each of `kernel_cases`: its error or null, and kernels that no earlier case compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from device import Device, fake_device
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction, MockTensor

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Gpu:
    """A GPU as its libraries describe it. `shared` is the most shared memory of a block in bytes."""

    name: str
    capability: tuple[int, int]
    shared: int
    processors: int

    @property
    def arch(self) -> int:
        return 10 * self.capability[0] + self.capability[1]


GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 163 << 10, 108),
    "sm_90": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 227 << 10, 132),
    "sm_100": Gpu("NVIDIA B200", (10, 0), 227 << 10, 148),
}


@dataclass
class Kernels:
    """Compiled kernels by name and arguments, each with its use of the GPU."""

    gpu: Gpu
    device: Device
    compiled: dict[str, dict[str, int]] = field(default_factory=dict)

    def compile(self, kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile for these arguments. If it needs too much shared memory, raises the error of a launch."""
        given = {name: _without_data(value) for name, value in options.items() if name not in ("grid", "warmup")}
        made = _run(kernel, *map(_without_data, args), grid=(1,), warmup=True, **given)
        if made.metadata.shared > self.gpu.shared:
            raise OutOfResources(made.metadata.shared, self.gpu.shared, "shared memory")
        types = ",".join(kind for kind in made.src.signature.values() if kind != "constexpr")
        key = f"{kernel.fn.__module__}.{kernel.fn.__name__}({types}) {made.hash[:8]}"
        if key not in self.compiled:
            self.compiled[key] = {"shared": made.metadata.shared, **_resources(made.asm["cubin"])}

    def tune(self, tuner: Autotuner, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile configurations until one fits. On a GPU, all that fit are measured."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        configs = tuner.prune_configs(options)
        errors = []
        for config in configs:
            try:
                tuner.fn.run(*args, **options, **config.all_kwargs())
                tuner.best_config = config
                return
            except (OutOfResources, CompileTimeAssertionFailure, PTXASError) as error:
                errors.append(f"{config}: {error}")
        raise AssertionError(f"none of {len(configs)} configurations fits: {errors}")


_run = JITFunction.run


def _without_data(value: Any) -> Any:
    """Return what Triton reads from a tensor: its type, and an address that is a multiple of 16."""
    return MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value


def _resources(binary: bytes) -> dict[str, int]:
    """Return registers and bytes of local memory per thread, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": max(found["STACK"], found["LOCAL"])}


class _Driver:
    """Triton's view of the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        properties = {"max_shared_mem": gpu.shared, "multiprocessor_count": gpu.processors, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda _: properties)
        self._gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextmanager
def compiling_for(gpu: Gpu) -> Iterator[Kernels]:
    """Pretend to have the GPU, also to packages that are imported in the block."""
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.processors,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.shared,
        total_memory=80 << 30,
    )
    torch.cuda.get_device_name = lambda *_: gpu.name
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.device = lambda *_: nullcontext()
    triton.runtime.driver.set_active(_Driver(gpu))

    with fake_device(gpu.capability) as device:
        kernels = Kernels(gpu, device)

        def launch(kernel: JITFunction, *args: Any, **options: Any) -> None:
            kernels.compile(kernel, args, options)

        def tune(tuner: Autotuner, *args: Any, **options: Any) -> None:
            kernels.tune(tuner, args, options)

        with patch.object(JITFunction, "run", launch), patch.object(Autotuner, "run", tune):
            yield kernels


def main(gpu: str, *parts: str) -> None:
    # Without its compiled part, mamba-ssm cannot be imported.
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    with compiling_for(GPUS[gpu]) as kernels:
        from kernel_cases import CASES

        for name, run in CASES.items():
            if not parts or any(part in name for part in parts):
                kernels.device.restart()
                before, error = set(kernels.compiled), None
                try:
                    run()
                except Exception as failure:
                    traceback.print_exc()
                    error = f"{type(failure).__name__}: {failure}"
                made = {key: use for key, use in kernels.compiled.items() if key not in before}
                waits = dict(kernels.device.waits)
                print(json.dumps({"name": name, "error": error, "waits": waits, "kernels": made}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
