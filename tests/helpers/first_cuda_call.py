"""Builds ranks and engines in processes that believe in their invented GPU, up to the first CUDA call.

`first_cuda_call:NAME` is a factory like the class NAME: it stops with what PyTorch without CUDA says to that call.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name

CLASSES = {
    "StudentRank": "rlhf_cli.backends.roles.student_rank:StudentRank",
    "TransformersEngine": "rlhf_cli.backends.rollout.transformers_engine:TransformersEngine",
}


@dataclass(frozen=True)
class Reached:
    """The error of the first CUDA call, and the variables of the process that chose the GPU."""

    error: str
    variables: dict[str, str]


def __getattr__(name: str) -> Callable[..., Reached]:
    return partial(_build, CLASSES.get(name, f"rlhf_cli.backends.roles.ranks:{name}"))


def _build(target: str, *args: object) -> Reached:
    import torch

    names = [name for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_SIZE") if name in os.environ]
    variables = {name: os.environ[name] for name in names}
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: len(variables["CUDA_VISIBLE_DEVICES"].split(","))
    try:
        resolve_name(target)(*args)
    except (AssertionError, AttributeError, RuntimeError) as error:
        return Reached(str(error), variables)
    raise AssertionError(f"{target} made no CUDA call")
