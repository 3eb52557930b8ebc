"""Settings of online commands, resolved as in the program."""

from typing import Any

from rlhf_cli import cli
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.roles import KLTerm
from rlhf_cli.options import build_config
from rlhf_cli.trainers.online.state import OnlineSettings

LEAST = {"pretrain": "x", "prompt_data": "x", "output": "x", "reward_funcs": "exact"}


def resolve(command: str, **given: Any) -> Any:
    cls = cli.COMMANDS[command].config_class
    return build_config(cls, LEAST | given)


def reference_terms(policy: PolicyConfig) -> dict[str, KLTerm]:
    """Return the KL penalties of a run with no other role."""
    return {"ref": KLTerm(policy.init_kl_coef, policy.kl_estimator)} if policy.init_kl_coef else {}


def online_settings(config: OnlineConfig, row: str) -> OnlineSettings:
    """Return the loop's settings with this row of the estimator table."""
    return OnlineSettings.of(config, ESTIMATORS[row])
