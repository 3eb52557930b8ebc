"""Post-training of language models from the command line, and from Python (docs/python.md).

Example: `rlhf_cli.sft(pretrain="models/base", dataset="rows.jsonl", output="runs/sft")` returns a `Run`.
"""

from typing import TYPE_CHECKING, Any

from rlhf_cli.version import __version__

if TYPE_CHECKING:
    from rlhf_cli.api import Run, RunError, UsageError

__all__ = ["Run", "RunError", "UsageError", "__version__"]


def _names() -> list[str]:
    from rlhf_cli.command_table import FUNCTIONS

    return [*__all__, *FUNCTIONS]


def __getattr__(name: str) -> Any:
    # Also called for submodules before they are imported.
    if name not in _names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on first use, because the command line imports this package too and must start quickly.
    from rlhf_cli import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return _names()
