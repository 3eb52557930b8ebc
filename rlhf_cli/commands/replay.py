"""`rlhf replay`: an iteration again, with other settings."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.replay import ReplayGroup


class ReplayConfig(CommandConfig):
    """Run an iteration of an online run again, and compare it with the same iteration under other settings.

    RUN is the run directory, which is not changed. The iteration starts from its checkpoint, with the same samples.
    """

    positional = "run"

    replay: ReplayGroup
