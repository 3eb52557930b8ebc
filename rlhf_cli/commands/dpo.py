"""`rlhf dpo`: preference optimization on pairs."""

from rlhf_cli.config.commands.dpo import DPOConfig
from rlhf_cli.runs.launch import begin_ranks


def dpo(config: DPOConfig) -> None:
    """Train a policy on preference pairs: DPO, IPO, SimPO, ORPO and other losses."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.dpo import dpo_task
    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, dpo_task(config))
