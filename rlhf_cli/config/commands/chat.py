"""The settings of `rlhf chat`."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.chat import ChatTextConfig
from rlhf_cli.config.evaluation import EvaluatedModelConfig
from rlhf_cli.config.rollout import SamplingConfig


class ChatConfig(CommandConfig):
    """Settings of `rlhf chat`."""

    unsupported = frozenset({"sampling.rollout_batch_size", "sampling.n_samples_per_prompt"})
    positional = "pretrain"

    model: EvaluatedModelConfig
    text: ChatTextConfig = ChatTextConfig()
    sampling: SamplingConfig = SamplingConfig()
