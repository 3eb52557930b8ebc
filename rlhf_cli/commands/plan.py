"""`rlhf plan`: memory, time and price of a command, before anything is loaded."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from rlhf_cli.command_table import COMMANDS, TRAINING
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plan import PlanConfig, ProofConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.flags import flags_of

PLANNED = (*TRAINING, "generate", "eval", "chat", "serve-rm")
"""Commands that can be planned."""
_UNKNOWN = "(not set)"
_SCORERS = (*RewardConfig.model_fields, "environment", "agent_command", "teacher_pretrain")
"""Settings with which a command needs no reward function."""


class PlanCommandConfig(CommandConfig):
    """Plan memory, time and price of a command on any hardware, without a GPU, weights or data.

    Put the command and its flags after `rlhf plan`: `rlhf plan grpo --pretrain Qwen/Qwen2.5-7B --gpu h100 --num_gpus
    8`. Only models are required; data, output and reward may be left out. The exit status is 3 if the command does not
    fit.
    """

    arguments = "COMMAND"
    example = "grpo --pretrain Qwen/Qwen2.5-7B --gpu h100 --num_gpus 8"

    plan: PlanConfig = PlanConfig()
    proof: ProofConfig = ProofConfig()


def plan_settings(config: CommandConfig) -> PlanConfig:
    """Return the settings of the plan in those of a planned command."""
    settings = dict(config)["plan"]
    assert isinstance(settings, PlanConfig)
    return settings


@cache
def planned_class(name: str) -> type[CommandConfig]:
    """Return the config class of a command with the settings of a plan in addition."""
    base: Any = COMMANDS[name].config_class

    class Planned(base):  # type: ignore[misc]
        command = name
        plan: PlanConfig = PlanConfig()

        @classmethod
        def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
            return {**_placeholders(base, given), **super().implied(given), **_of_hardware(base, given)}

    Planned.__doc__ = base.__doc__
    return Planned


def _placeholders(base: type[CommandConfig], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of settings that a plan cannot read from data, which may be missing: paths, reward, images."""
    # The package of benchmark tasks reads prompts of its own.
    if given.get("tasks"):
        return {}
    flags = flags_of(base).values()
    values: dict[str, Any] = {
        flag.name: _UNKNOWN
        for flag in flags
        if (flag.required and not flag.name.endswith("pretrain")) or flag.name == "prompt_data"
    }
    names = {flag.name for flag in flags}
    if "reward_funcs" in names and not any(given.get(name) for name in _SCORERS):
        values["reward_funcs"] = ["exact"]
    if given.get("image_key"):
        values["images_per_row"] = 1
    return values


def _of_hardware(base: type[CommandConfig], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults that depend on the planned hardware instead of this machine."""
    names, values = {flag.name for flag in flags_of(base).values()}, dict[str, Any]()
    on_gpu = given.get("gpu") not in (None, "cpu") or given.get("gpu_memory_gib") is not None
    if on_gpu and "param_dtype" in names:
        values["param_dtype"] = "bf16"
    # One launcher per machine starts the ranks; on several nodes, it is torchrun or similar.
    if "num_processes" in names and _is_count(given.get("num_gpus")) and str(given.get("num_nodes") or 1) == "1":
        values["num_processes"] = given["num_gpus"]
    return values


def _is_count(value: object) -> bool:
    """Return whether a value, perhaps still text of a flag, is a positive integer. Others have an error themselves."""
    return str(value).isdecimal() and int(str(value)) > 0
