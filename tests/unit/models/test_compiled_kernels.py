"""Triton kernels of Liger, flash-linear-attention and mamba-ssm, compiled for GPUs that are not here."""

import re

import pytest
from fake_cuda.start import run_fake
from registry import pinned, unpacked

from rlhf_cli.models.fused import _KERNELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXPECTED = {
    "Liger": {"_rms_norm_forward", "_rms_norm_backward", "_rope", "_swiglu_", "_geglu_"},
    "scan qwen3_5_text": {"l2norm_fwd", "l2norm_bwd", "fwd_kernel_h", "bwd_kernel_dhu", "prepare_wy_repr_bwd"},
    "scan kimi_linear": {"chunk_kda_fwd", "chunk_kda_bwd"},
    "scan bamba": {"_chunk_scan_fwd", "_chunk_state_bwd", "_state_passing_bwd"},
}
"""Parts of kernel names by parts of names of cases."""
SPILLED = 32
"""Bytes per thread. Above 16,384 columns, MLP kernels have 32 warps with 64 registers per thread; one spills 24."""


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_within_the_shared_memory_of_the_gpu(gpu: str, tmp_path) -> None:
    packages = unpacked(*pinned("liger-kernel", "flash-linear-attention", "mamba-ssm"), complete=True)
    results = run_fake("compiling.py", gpu, packages=packages, TRITON_CACHE_DIR=str(tmp_path))
    failed = {name: result for name, result in results.items() if result["error"] or result["waits"]}
    assert not failed
    assert {f"Liger {kind}" for kind in _KERNELS} <= results.keys()
    for case, parts in EXPECTED.items():
        made = " ".join(kernel for name, result in results.items() if case in name for kernel in result["kernels"])
        assert all(part in made for part in parts), (case, sorted(set(re.findall(r"\.(\w+)\(", made))))
    # Norms, rotary embeddings and MLPs are limited by memory bandwidth, which spilled registers would use.
    liger = [use for name, result in results.items() if "Liger" in name for use in result["kernels"].values()]
    assert max(use["spilled"] for use in liger) <= SPILLED
