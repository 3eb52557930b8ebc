"""Converts settings of `rlhf data` to the data settings of the selected command. This module imports nothing heavy."""

from pydantic import create_model

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    StepDataConfig,
    TemplateConfig,
)
from rlhf_cli.config.inspection import ShownDataConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config

DATA_CONFIGS: dict[str, type[SettingsGroup]] = {
    "sft": DataConfig,
    "rm": PreferenceDataConfig,
    "prm": StepDataConfig,
    "dpo": PreferenceDataConfig,
    "kto": LabelledDataConfig,
    "distill": DataConfig,
    **dict.fromkeys(ONLINE_TRAINING, PromptConfig),
}
"""Data settings class for each command."""
PROMPT_NAMES = {"dataset": "prompt_data", "dataset_probs": "prompt_data_probs", "dataset_split": "prompt_split"}
"""Names in `rlhf data` and in online commands, where they differ."""


def settings_of(command: str, given: ShownDataConfig, template: TemplateConfig) -> SettingsGroup:
    """Return the data settings for `command`. Raises UsageError for settings that it does not have."""
    fields = type(given).model_fields
    names = PROMPT_NAMES if command in ONLINE_TRAINING else {}
    # Pass only changed settings, so that defaults of the command apply.
    values = {name: value for name, value in given if value != fields[name].default}
    cls = DATA_CONFIGS[command]
    if command in ONLINE_TRAINING:
        # Online commands have this setting, but in another group.
        values.pop("max_new_tokens", None)
    foreign = [name for name in values if names.get(name, name) not in cls.model_fields]
    if command not in ONLINE_TRAINING:
        foreign += [name for name in ("prompt_template", "format_prompt") if template.changed(name)]
    if foreign:
        raise UsageError(f"{', '.join(f'--{name}' for name in foreign)}: rlhf {command} has no such setting")
    # Validate with the class of the command, for the same limits and messages.
    command_cls = create_model("Data", __base__=CommandConfig, data=(cls, ...))
    config = build_config(command_cls, {names.get(name, name): value for name, value in values.items()})
    return config.data  # type: ignore[attr-defined, no-any-return]


def benchmark_settings(benchmarks: str) -> PromptConfig:
    """Return the settings that read the prompts of --contamination. Their columns are detected by name."""
    return PromptConfig(prompt_data=benchmarks, prompt_split="test")
