"""Planned activations and launches per layer against counts on fake CUDA tensors, with few layers of real sizes."""

from typing import Any

import pytest
from fake_cuda.start import run_fake
from registry import pinned, unpacked

BOUND = 0.1
"""The plan and the exact peak differ by less, as docs/commands/plan.md says."""
CASES = (
    *("Qwen2.5-1.5B 4096 grpo kept", "Qwen2.5-1.5B 4096 grpo kept Liger", "Qwen2.5-1.5B 4096 grpo recomputed"),
    *("Qwen2.5-1.5B 4096 sft kept", "Qwen2.5-1.5B 4096 dpo kept", "Qwen2.5-1.5B 4096 ppo recomputed"),
    *("Qwen2.5-1.5B 15360 grpo LoRA recomputed", "Qwen2.5-1.5B 15360 grpo recomputed Liger"),
    *("Qwen3-30B-A3B 4096 grpo recomputed", "lfm2 4096 grpo kept", "gemma2 4096 grpo kept"),
)
LAUNCHES = {"kept": 124, "kept Liger": 49, "recomputed": 162}
"""Kernels per layer of Qwen2.5-1.5B."""
OUTSIDE = 240
"""Kernels outside of layers in an actor's micro-batch of 4 x 1,024 tokens with a vocabulary of 32,768."""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    packages = unpacked(*pinned("liger-kernel"), complete=True)
    return run_fake("activations.py", "2", *CASES, packages=packages)


@pytest.mark.parametrize("case", CASES)
def test_plans_are_near_the_exact_peak(case: str, results: dict[str, Any]) -> None:
    assert results[case]["planned"] == pytest.approx(results[case]["exact"], rel=BOUND)


@pytest.mark.parametrize("layers", LAUNCHES)
def test_launches_do_not_increase(layers: str, results: dict[str, Any]) -> None:
    assert results[f"Qwen2.5-1.5B 4096 grpo {layers}"]["operators"] <= 2 * LAUNCHES[layers] + OUTSIDE
