"""What `rlhf data` shows: the data settings of all commands that it can stand in for.

That none of theirs is missing here, and that defaults are the same, is tested.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.command_table import ONLINE_TRAINING, TRAINING
from rlhf_cli.config.base import SettingsGroup
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
    """Command whose reading of the data is shown; below, ppo stands for all that sample from prompts."""
    num_rows: int = Field(3, ge=0)
    """Examples shown, spread over the data."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of the order in which mixed data sets are read, as of the command."""
    train_max_tokens_per_gpu: int = Field(16_192, gt=0)
    """Tokens in one packed micro-batch at most, as of the command."""
    sequence_parallel_size: int = Field(1, gt=0)
    """Ranks that share each sequence, as of the command: a micro-batch holds as many times the tokens."""

    @property
    def reads_prompts(self) -> bool:
        """Whether the command samples from prompts that it reads."""
        return self.for_ in ONLINE_TRAINING

    @property
    def room(self) -> int:
        """Tokens of a micro-batch, and so of a sequence, at most."""
        return self.train_max_tokens_per_gpu * self.sequence_parallel_size


ALL_FORMATS = tuple(
    dict.fromkeys((*SEQUENCE_FORMATS, *PAIR_FORMATS, *LABELLED_FORMATS, *STEP_FORMATS, *PROMPT_FORMATS))
)


class ShownDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the better response, or the conversation with it; found by its name if not given."""
    rejected_key: str | None = None
    """Column with the worse response, or the conversation with it; found by its name if not given."""
    step_separator: str = Field(r"\n", min_length=1)
    """Text between the steps of a response; a typed \\n means a line break. A step's score is read where it ends."""
    placeholder_token: str = Field("ки", min_length=1)
    """Text behind each step in rows of the format placeholder; by default Math-Shepherd's. It is not trained on."""
    reward_tokens: tuple[str, str] = ("+", "-")
    """Labels of a right and of a wrong step, beside true, false and numbers from 0 to 1."""
    data_format: Annotated[str, Plugin(ALL_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """How rows are read; auto decides by the columns. prompt_response to text are of sft and distill, explicit_prompt
    and shared_prompt of rm and dpo, unpaired and preference of kto, stepwise to processbench of prm, prompt, messages
    and sharegpt of ppo."""
    output_key: str | None = None
    """Column with the response (sft, distill, kto) or the list of steps (prm); found by its name if not given."""
    label_key: str | None = None
    """Column that marks desirable responses (kto), with the labels of steps (prm), or the ground truth (ppo)."""
    pretrain_mode: bool = False
    """Train on every token, not only on the assistant's (sft, distill)."""
    train_on_last_step_only: bool = False
    """Train on the last labelled step of each solution alone (prm)."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Treatment of prompts that leave no room for max_new_tokens (ppo)."""
    pass_rate_range: tuple[float, float] | None = None
    """Use only prompts whose column pass_rate is in this range, both ends included (ppo)."""
    max_new_tokens: int = Field(1024, gt=0)
    """Tokens generated per response at most (ppo)."""
