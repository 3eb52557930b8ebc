"""The data settings of the command that `rlhf data` stands in for; imports nothing heavy."""

from pydantic import create_model

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    StepDataConfig,
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
"""The data settings of each command."""
PROMPT_NAMES = {"dataset": "prompt_data", "dataset_probs": "prompt_data_probs", "dataset_split": "prompt_split"}
"""What prompts are called in the settings of online commands."""


def settings_of(command: str, given: ShownDataConfig) -> SettingsGroup:
    """Return the command's own data settings. Raise UsageError names a setting that it does not have."""
    fields = type(given).model_fields
    names = PROMPT_NAMES if command in ONLINE_TRAINING else {}
    values = {name: value for name, value in given if value != fields[name].default}
    cls = DATA_CONFIGS[command]
    if command in ONLINE_TRAINING:
        values.pop("max_new_tokens", None)  # a setting of the command, though not of its data
    foreign = [name for name in values if names.get(name, name) not in cls.model_fields]
    if foreign:
        raise UsageError(f"{', '.join(f'--{name}' for name in foreign)}: rlhf {command} has no such setting")
    command_cls = create_model("Data", __base__=CommandConfig, data=(cls, ...))
    config = build_config(command_cls, {names.get(name, name): value for name, value in values.items()})
    return config.data  # type: ignore[attr-defined, no-any-return]
