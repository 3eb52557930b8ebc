"""The first step of an offline command, in the process that a person starts and in every rank."""

import sys

from rlhf_cli.config.train import CheckpointConfig, LaunchConfig, TrackingConfig


def begin_ranks(checkpoint: CheckpointConfig, launch: LaunchConfig, tracking: TrackingConfig) -> None:
    """Check the run directory and the trackers. If several ranks are asked for, run them and exit with their status."""
    from rlhf_cli.backends.training.distributed_env import is_under_launcher, rank_and_world_size
    from rlhf_cli.runs.run_directory import check_run_directory

    if rank_and_world_size()[0] == 0:
        check_run_directory(checkpoint)
    if launch.num_processes > 1 and not is_under_launcher():
        from rlhf_cli.backends.process.launch import run_ranks

        sys.exit(run_ranks(launch.num_processes, sys.argv[1:]))
    from rlhf_cli.tracking.tracker import check_tracking

    check_tracking(tracking)
