"""`rlhf schema`: settings files that commands accept are valid, and wrong ones are not."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from rlhf_cli import cli
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.flags import flags_of
from rlhf_cli.options import to_yaml, typer_command
from rlhf_cli.runs.schema import settings_schema

RECIPES = sorted((Path(__file__).parents[3] / "examples" / "recipes").rglob("*.yaml"))


def schema_of(command: str) -> dict[str, Any]:
    return settings_schema(command, COMMANDS[command].config_class)


def errors(command: str, values: object) -> list[str]:
    return [error.message for error in Draft202012Validator(schema_of(command)).iter_errors(values)]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_the_schema_is_valid_and_has_every_setting(command):
    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    assert schema["properties"].keys() == flags_of(COMMANDS[command].config_class).keys() | {"extends"}


@pytest.mark.parametrize("command", [name for name, entry in COMMANDS.items() if entry.config_class.example])
def test_a_written_config_is_valid(command):
    words, settings = shlex.split(COMMANDS[command].config_class.example), COMMANDS[command].config_class
    if command == "plan":
        command, settings, words = words[0], planned_class(words[0]), words[1:]
    read: list[CommandConfig] = []
    typer_command(command, settings, read.append, words).main(words, standalone_mode=False)
    written = yaml.safe_load(to_yaml(read[0]))
    assert not list(Draft202012Validator(settings_schema(command, settings)).iter_errors(written))


@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{recipe.parent.name} {recipe.stem}" for recipe in RECIPES])
def test_recipes_are_valid(recipe):
    assert errors(recipe.parent.name, yaml.safe_load(recipe.read_text())) == []


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rat": 1e-5},
        {"learning_rate": "fast"},
        {"learning_rate": -1},
        {"zero_stage": 4},
        {"max_epochs": 1.5},
        {"optim": "sgd"},
        {"adam_betas": [0.9]},
        {"batch": {"max_epochs": 1}},
    ],
)
def test_wrong_settings_are_errors(values):
    assert errors("sft", values)


@pytest.mark.parametrize(
    "values",
    [
        {"reward_funcs": "gsm8k,format", "extends": "base.yaml"},
        {"reward_funcs": ["gsm8k"], "extends": ["a.yaml", "b.yaml"], "gradient_checkpointing": "auto"},
        {"adam_betas": [0.9, 0.95], "vllm_args": {"max_num_seqs": 8}, "kl_target": None},
    ],
)
def test_values_that_files_may_have_are_valid(values):
    assert errors("grpo", values) == []


def test_the_command_prints_it(capsys):
    assert cli.main(["schema", "sft"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("sft")
