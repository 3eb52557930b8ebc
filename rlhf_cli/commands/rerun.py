"""`rlhf rerun`: a run again, to prove that it repeats."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.replay import RerunGroup


class RerunConfig(CommandConfig):
    """Run a training run again in a new folder, and compare metrics, samples and model bit for bit.

    RUN is the run directory, which is not changed. The first difference stops the repetition; it is printed with its
    likely cause, such as changed data, packages or another processor.
    """

    positional = "run"

    rerun: RerunGroup
