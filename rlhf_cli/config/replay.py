"""Settings of `rlhf replay`, `rlhf rerun` and `rlhf why`."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class ReplayGroup(SettingsGroup):
    """Replay"""

    run: str
    """Run directory of an online command."""
    iteration: int = Field(gt=0)
    """Iteration to run again."""
    set: list[str] | None = None
    """Settings of the iteration to change, as NAME=VALUE: `eps_clip=0.3,init_kl_coef=0`."""
    sample_again: bool = False
    """Sample new responses for the iteration's prompts, with another random seed. You can then also change sampling
    settings: `temperature=0.8`.
    """


class RerunGroup(SettingsGroup):
    """Rerun"""

    run: str
    """Run directory of a training command."""
    output: str | None = None
    """Run directory of the repetition, which must not exist. Default: RUN.rerun."""
    until: int | None = Field(None, gt=0)
    """Stop after this step (online: iteration). Default: the last one of the run."""


class WhyGroup(SettingsGroup):
    """Why"""

    run: str
    """Run directory of a training command."""
    sample: str | None = None
    """`id` of a response in samples.jsonl; with offline commands, file and line of a row, like `rows.jsonl:12`. Without
    it, offline commands list the rows of the step, the largest loss first.
    """
    token: int | None = Field(None, ge=0)
    """Number of a sampled or trained token, from 0. Default: a table of all tokens."""
    step: int | None = Field(None, gt=0)
    """Optimizer step of an offline command. Default with --sample: the first that trained the row."""
    json_file: str | None = None
    """Also write the explanation and values of all tokens to this file, as JSON."""
