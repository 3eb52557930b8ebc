"""Post-training of language models from the command line, and from Python (docs/python.md)."""

from typing import TYPE_CHECKING, Any

from rlhf_cli.version import __version__

if TYPE_CHECKING:
    from rlhf_cli.api import (
        Run,
        RunError,
        UsageError,
        distill,
        dpo,
        eval,
        generate,
        gkd,
        grpo,
        kto,
        ppo,
        prm,
        reinforce,
        remax,
        rloo,
        rm,
        sft,
    )

__all__ = [
    "Run",
    "RunError",
    "UsageError",
    "__version__",
    "distill",
    "dpo",
    "eval",
    "generate",
    "gkd",
    "grpo",
    "kto",
    "ppo",
    "prm",
    "reinforce",
    "remax",
    "rloo",
    "rm",
    "sft",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line imports this package too, and must start quickly.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlhf_cli import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
