"""Starts offline commands, in the user's process and in each rank."""

import sys
from pkgutil import resolve_name

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.offline import OfflineConfig
from rlhf_cli.config.train import LaunchConfig, TrackingConfig


def begin_ranks(launch: LaunchConfig, tracking: TrackingConfig) -> None:
    """Check the trackers. With `num_processes` above 1, start the ranks and exit with their status."""
    from rlhf_cli.backends.training.distributed_env import is_under_launcher

    if launch.num_processes > 1 and not is_under_launcher():
        from rlhf_cli.backends.process.launch import run_ranks

        sys.exit(run_ranks(launch.num_processes, sys.argv[1:]))
    from rlhf_cli.tracking.sinks import check_tracking

    check_tracking(tracking)


def train_offline(config: OfflineConfig) -> None:
    """Run an offline command's task on each rank. Heavy imports follow the start of the ranks."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.run import run_offline

    run_offline(config, resolve_name(f"rlhf_cli.runs.{COMMANDS[config.command].task}")(config))
