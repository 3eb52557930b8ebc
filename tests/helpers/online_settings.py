"""Settings of online commands, resolved as the program does."""

from typing import Any

from rlhf_cli import cli
from rlhf_cli.flags import config_class
from rlhf_cli.options import build_config

LEAST = {"pretrain": "x", "prompt_data": "x", "output": "x", "reward_funcs": "exact"}


def resolve(command: str, **given: Any) -> Any:
    cls = config_class(cli.command_function(cli.COMMANDS[command]))
    return build_config(cls, LEAST | given)
