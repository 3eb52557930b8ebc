"""The settings of `rlhf serve-rm`."""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.serve import ServeConfig, ServedModelConfig, ServedRewardConfig


class ServeRMConfig(BaseModel):
    """Settings of `rlhf serve-rm`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: ServedRewardConfig
    model: ServedModelConfig = ServedModelConfig()
    server: ServeConfig = ServeConfig()
