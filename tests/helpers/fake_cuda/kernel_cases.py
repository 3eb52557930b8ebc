"""Forward and backward passes that launch Triton kernels, in the sizes of published models.

Import this inside `compiling_for`: packages with kernels read the GPU when they are imported.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cases import actor, batch_of, samples_of_one_prompt
from device import CUDA
from models import model_on_gpu
from tiny_causal_models import sequences
from transformers import AutoConfig, PretrainedConfig

import rlhf_cli
from rlhf_cli.models import fused
from rlhf_cli.models.policy import PolicyModel

PUBLISHED = json.loads((Path(rlhf_cli.__file__).parent / "planning" / "published.json").read_text())
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention"]},
    "olmo_hybrid": {"num_hidden_layers": 2},  # needs a layer of attention
    "bamba": {},
}
"""Model types by kind of scan, with settings that leave a layer of it."""
MISSING: dict[str, dict[str, Any]] = {"ministral": {"head_dim": 128}}
"""Settings without a usable default in transformers."""


def config_of(kind: str, **settings: Any) -> PretrainedConfig:
    """Return a configuration with one layer. The default sizes in transformers are those of a published model."""
    return AutoConfig.for_model(kind, **{"num_hidden_layers": 1} | settings)


def train(config: PretrainedConfig, *, fuses: bool = False, shares: bool = False) -> None:
    """Compute loss and gradients of a pack."""
    model = model_on_gpu(config)
    if fuses:
        fused.fuse(model)
    samples = samples_of_one_prompt() if shares else sequences()
    _, loss = actor(PolicyModel(model), batch_of(samples, shares=shares).to(CUDA))
    loss.backward()


def fuse_and_train(model_type: str, **sizes: Any) -> None:
    train(config_of(model_type, **sizes | {"num_hidden_layers": 1}), fuses=True)


def scan(kind: str, *, shares: bool) -> None:
    train(config_of(kind, **RECURRENT[kind]), shares=shares)


CASES: dict[str, Callable[[], None]] = {
    **{f"Liger {kind}": partial(fuse_and_train, kind, **MISSING.get(kind, {})) for kind in fused._KERNELS},
    **{f"Liger {one['names'][0]}": partial(fuse_and_train, **one["config"]) for one in PUBLISHED},
    **{f"scan {kind}": partial(scan, kind, shares=False) for kind in RECURRENT},
    **{f"scan {kind} with shared prompts": partial(scan, kind, shares=True) for kind in RECURRENT},
}
