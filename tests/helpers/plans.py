"""Plans of commands, made as `rlhf plan` makes them."""

from typing import Any

from rlhf_cli.commands.plan import planned_class
from rlhf_cli.options import build_config
from rlhf_cli.planning.changes import Change
from rlhf_cli.planning.engines import EngineMemory
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.planner import Plan, make_plan
from rlhf_cli.runs.plan import plan_with_changes

SMALL, LARGE = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B"


def plan_config(command: str, **values: Any) -> Any:
    """Return the settings of `rlhf plan COMMAND`, by default for one H100."""
    given = {"pretrain": LARGE, "gpu": "h100"} | values
    return build_config(planned_class(command), {name: value for name, value in given.items() if value is not None})


def plan_of(command: str, **values: Any) -> Plan:
    """Return the plan of a command without changes."""
    config = plan_config(command, **values)
    return make_plan(config, config.plan, hardware_of(config.plan), has_critic=command == "ppo")


def engine_of(plan: Plan) -> EngineMemory:
    assert plan.work.engine is not None
    return plan.work.engine


def plans_of(command: str, **values: Any) -> tuple[Plan, list[Change]]:
    """Return the plan and the changes that `rlhf plan` prints."""
    config = plan_config(command, **values)
    return plan_with_changes(config, config.plan)
