"""The settings of `rlhf remax`."""

from rlhf_cli.config.commands.online import OnlineConfig


class ReMaxConfig(OnlineConfig):
    """Settings of `rlhf remax`."""
