"""The settings of `rlhf serve-rm`."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.serve import ServeConfig, ServedModelConfig, ServedRewardConfig


class ServeRMConfig(CommandConfig):
    """Settings of `rlhf serve-rm`."""

    reward: ServedRewardConfig
    model: ServedModelConfig = ServedModelConfig()
    server: ServeConfig = ServeConfig()
