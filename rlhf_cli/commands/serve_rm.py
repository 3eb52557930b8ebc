"""`rlhf serve-rm`: serve rewards over HTTP."""

from typing import Self

from pydantic import model_validator

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.rewards import REWARDS
from rlhf_cli.config.scoring import JUDGES, SHAPING, STEP_REWARDS, RewardConfig
from rlhf_cli.config.serve import ServeConfig, ServedModelConfig

_UNSERVABLE = ("length", "group", "episode")
"""Rewards that depend on the token count of responses, which requests do not contain."""


class ServeRMConfig(CommandConfig):
    """Serve a reward model, verifiers or your reward function over HTTP, for runs with --remote_rm_url.

    The reward model may use a different tokenizer than the policy. Requests are POST /get_reward {"query": [...],
    "prompts": [...], "labels": [...]}, and the response is {"rewards": [...]}. Requests do not contain token counts or
    truncation: length rewards are rejected, and a reward model adds an EOS token to truncated responses too, unlike
    with --reward_pretrain.
    """

    example = "--reward_pretrain runs/rm --port 5000"
    unsupported = (
        STEP_REWARDS
        | SHAPING
        | JUDGES
        | {
            "reward.reward_key",
            "reward.reward_by_source",
            "reward.remote_rm_url",
            "reward.remote_rm_weight",
            "reward.remote_rm_timeout",
            "reward.remote_rm_batch_size",
            "reward.remote_rm_api_key_env",
        }
    )

    reward: RewardConfig = RewardConfig(reward_max_failures=1.0)
    model: ServedModelConfig = ServedModelConfig()
    server: ServeConfig = ServeConfig()

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if not self.reward.is_given:
            names = ", ".join(name for name, row in REWARDS.items() if row.kind not in _UNSERVABLE and not row.by_row)
            raise ValueError(
                f"nothing to serve: set --reward_pretrain MODEL, --reward_funcs ({names}) or --reward_func FILE.py"
            )
        self.reward.require_model_to_normalize()
        return self

    @model_validator(mode="after")
    def _check_requests(self) -> Self:
        if self.reward.is_by_row:
            raise ValueError(
                "reward_funcs by_row requires dataset rows, which requests do not contain: set it in the training run"
            )
        if unknown := [call.name for call in self.reward.rewards if call.row.kind in _UNSERVABLE]:
            raise ValueError(
                f"reward_funcs {unknown[0]} requires the response length in tokens, which requests do not contain: "
                "set it in the training run, in addition to --remote_rm_url"
            )
        return self
