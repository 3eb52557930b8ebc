"""Startup lines on the learning rates of adapters, which are higher than those of full fine-tuning."""

from collections.abc import Collection

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.presets import ADAPTER_RATE

_SOURCE = "LoRA Without Regret, Schulman et al. 2025"

_RANGE = 3.0
"""A rate up to this multiple of the default of full fine-tuning is in the range of full fine-tuning: on a log scale, it
is closer to that default than to the tenfold one."""


def adapter_rate_facts(config: CommandConfig, adapted: Collection[str]) -> dict[str, str]:
    """Return the reason for each learning rate that is ten times the default of full fine-tuning.

    Args:
        adapted: the settings of the learning rates that train an adapter.
    """
    rates = [name for name in adapted if config.setting(name) == _adapter_rate(config, name)]
    text = ", ".join(f"--{name} {config.setting(name):g}" for name in rates)
    return {"Adapter": f"{text}: {ADAPTER_RATE} times the default of full fine-tuning ({_SOURCE})"} if rates else {}


def adapter_rate_notices(config: CommandConfig, adapted: Collection[str]) -> list[str]:
    """Return a notice for each learning rate of an adapter that is in the range of full fine-tuning."""
    return [
        f"--{name} {config.setting(name):g} is in the range of full fine-tuning, and adapters need about "
        f"{ADAPTER_RATE} times as much ({_SOURCE}): try --{name} {_adapter_rate(config, name):g}"
        for name in adapted
        if config.setting(name) <= _RANGE * _full_rate(config, name)
    ]


def _adapter_rate(config: CommandConfig, name: str) -> float:
    # Six digits, as in the default.
    return float(f"{ADAPTER_RATE * _full_rate(config, name):.6g}")


def _full_rate(config: CommandConfig, name: str) -> float:
    """Return the command's default of a learning rate without an adapter."""
    groups = (field.default for field in type(config).model_fields.values())
    rate: float = next(getattr(group, name) for group in groups if name in getattr(type(group), "model_fields", ()))
    return rate
