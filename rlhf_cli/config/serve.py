"""What `rlhf serve-rm` serves, where, and within which bounds."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_cli.config.base import SettingsGroup
from rlhf_cli.config.model import ParamDtype
from rlhf_cli.config.rewards import REWARD_PLUGIN, REWARDS
from rlhf_cli.config.scoring import REMOTE_RM_KEY, RequestScoringConfig, RewardModelConfig

UNSERVABLE = ("length", "group", "episode")
"""Kinds of rewards that go by the number of tokens of a response, which requests do not carry."""


class ServedRewardConfig(RequestScoringConfig, RewardModelConfig):
    """Reward"""

    reward_funcs: Annotated[list[str], REWARD_PLUGIN] = []
    """Rewards, added up. Code of yours gets a response and its label. Rewards by length in tokens, and by_row, belong
    to the run, because requests carry neither tokens nor rows."""
    reward_pretrain: str | None = None
    """Reward model: a folder, a run of `rlhf rm` or a Hugging Face name; reads texts with a tokenizer of its own, and
    each with an end of sequence: a request does not show that a response was cut, as a run's own reward model knows."""
    reward_max_failures: float = Field(1.0, ge=0, le=1)
    """Share of a request's rewards that may fail; above it the request is answered with status 500."""

    @model_validator(mode="after")
    def _there_is_a_reward(self) -> "ServedRewardConfig":
        if not self.reward_funcs and self.reward_func is None and self.reward_pretrain is None:
            names = ", ".join(name for name, row in REWARDS.items() if row.kind not in UNSERVABLE and not row.by_row)
            raise ValueError(
                f"nothing to serve: give --reward_pretrain MODEL, --reward_funcs ({names}) or --reward_func FILE.py"
            )
        return self

    @model_validator(mode="after")
    def _requests_carry_what_is_needed(self) -> "ServedRewardConfig":
        if self.is_by_row:
            raise ValueError(
                "reward_funcs by_row goes by rows, which requests do not carry: give it to the run that asks"
            )
        if unknown := [call.name for call in self.rewards if call.row.kind in UNSERVABLE]:
            raise ValueError(
                f"reward_funcs {unknown[0]} goes by the number of tokens of a response, which requests do not carry: "
                "give it to the run that asks, beside --remote_rm_url"
            )
        return self


class ServedModelConfig(SettingsGroup):
    """Model"""

    param_dtype: ParamDtype = Field("auto", validate_default=True)
    """Type of the reward model's weights; auto is bf16 where its products are fast, else fp32."""
    max_len: int = Field(8192, gt=1)
    """Tokens of a text that the reward model reads at most; the reward of a longer one fails."""
    max_tokens_per_gpu: int = Field(16_384, gt=1)
    """Tokens in one packed forward pass at most: the bound on memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _a_text_fits(self) -> "ServedModelConfig":
        if self.max_len > self.max_tokens_per_gpu:
            raise ValueError(
                f"max_tokens_per_gpu {self.max_tokens_per_gpu} cannot hold a text of max_len {self.max_len}: raise the "
                "one or lower the other"
            )
        return self


class ServeConfig(SettingsGroup):
    """Server"""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own (127.0.0.1, ::1) needs a key in api_key_env."""
    port: int = Field(5000, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""
    api_key_env: str = REMOTE_RM_KEY
    """Environment variable with the key that clients have to show; if it is not set, a key is made and printed."""
    max_queue: int = Field(4096, gt=0)
    """Texts that may wait; a request that finds no room gets status 503 and may be sent again."""
    max_texts: int = Field(256, gt=0)
    """Texts in a request at most (413)."""
    max_chars: int = Field(400_000, gt=0)
    """Characters of a text at most (422)."""
    max_images: int = Field(8, ge=0)
    """Pictures of a text at most (422)."""
    max_body_mb: float = Field(16.0, gt=0)
    """Size of a request in MB at most (413)."""

    @model_validator(mode="after")
    def _a_request_fits(self) -> "ServeConfig":
        if self.max_texts > self.max_queue:
            raise ValueError(f"max_queue {self.max_queue} has no room for a request of max_texts {self.max_texts}")
        return self
