"""Settings of `rlhf data`: the data settings of all commands.

Tests verify that none is missing, and that defaults are equal.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.command_table import ONLINE_TRAINING, TRAINING
from rlhf_cli.config.base import Needs, SettingsGroup
from rlhf_cli.config.data import (
    LABELLED_FORMATS,
    PAIR_FORMATS,
    PARAMETERS_OF_FORMAT,
    PROMPT_FORMATS,
    SEQUENCE_FORMATS,
    STEP_FORMATS,
    OfflineDataConfig,
)
from rlhf_cli.config.plugins import Plugin


class ShowConfig(SettingsGroup):
    """Show"""

    for_: Literal[*TRAINING] = Field(alias="for")  # type: ignore[valid-type]
    """Training command that will read the data. In this help, ppo stands for all commands that sample from prompts."""
    num_rows: int = Field(3, ge=0)
    """Number of examples to show, spread over the data."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Random seed for the order of mixed datasets, as in the command."""
    train_max_tokens_per_gpu: int = Field(16_192, gt=0)
    """Maximum tokens per packed micro-batch, as in the command."""
    sequence_parallel_size: int = Field(1, gt=0)
    """Ranks that share each sequence, as in the command. Multiplies the tokens per micro-batch."""
    contamination: str | None = None
    """Benchmarks (files, folders or Hub names, separated by commas; split test by default). Lists their prompts that
    share 13 consecutive words with the data, instead of showing the data, and exits with 1 if there are any.
    """
    as_json: bool = Field(False, alias="json")
    """Print the results of --rewards or --contamination as JSON."""

    @property
    def reads_prompts(self) -> bool:
        """Whether the command samples responses to prompts."""
        return self.for_ in ONLINE_TRAINING

    @property
    def room(self) -> int:
        """Maximum tokens in a micro-batch, and thus in a sequence."""
        return self.train_max_tokens_per_gpu * self.sequence_parallel_size


class RewardTestConfig(SettingsGroup):
    """Reward test"""

    needs = Needs("rewards")

    rewards: bool = False
    """Test the rewards of an online command on right, wrong and meaningless responses to these prompts, instead of
    showing the data. Exits with 1 if the rewards pay for junk, refuse right answers or fail.
    """
    reward_rows: int = Field(50, gt=0)
    """Number of prompts to test, spread over the data; about 60 responses each. Lower it for a slow reward."""
    expect: str | None = None
    """JSONL file with responses and their expected reward: {"label": "42", "response": "It is 42.", "reward": 1}.
    Select the prompt with row (from 0), prompt or label.
    """


_ALL_FORMATS = tuple(
    dict.fromkeys((*SEQUENCE_FORMATS, *PAIR_FORMATS, *LABELLED_FORMATS, *STEP_FORMATS, *PROMPT_FORMATS))
)


class ShownDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the chosen response or conversation. Default: detected by name."""
    rejected_key: str | None = None
    """Column with the rejected response or conversation. Default: detected by name."""
    step_separator: str = Field(r"\n", min_length=1)
    """Separator between the steps of a response; \\n is a line break. A step's score is read at its end."""
    placeholder_token: str = Field("ки", min_length=1)
    """Text after each step in rows with format placeholder. The default is Math-Shepherd's. It is not trained."""
    reward_tokens: tuple[str, str] = ("+", "-")
    """Labels for a correct and a wrong step, in addition to true, false, and numbers from 0 to 1."""
    data_format: Annotated[str, Plugin(_ALL_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Row format. auto detects it from the columns. prompt_response to text are for sft and distill, explicit_prompt
    and shared_prompt for rm and dpo, unpaired and preference for kto, stepwise to processbench for prm, and prompt,
    messages and sharegpt for ppo.
    """
    output_key: str | None = None
    """Column with the response (sft, distill, kto) or list of steps (prm). Default: detected by name."""
    label_key: str | None = None
    """Column with the label (kto), step labels (prm), or ground truth (ppo)."""
    pretrain_mode: bool = False
    """Train on all tokens instead of only the assistant's (sft, distill)."""
    train_on_last_step_only: bool = False
    """Train only on the last labeled step of each solution (prm)."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """How to handle prompts without room for max_new_tokens (ppo)."""
    pass_rate_range: tuple[float, float] | None = None
    """Use only prompts with a pass_rate in this range, inclusive (ppo)."""
    teacher_context_key: str | None = None
    """Column with text that only a teacher reads, before the text of the last message (ppo)."""
    max_new_tokens: int = Field(1024, gt=0)
    """Maximum number of generated tokens per response (ppo)."""
