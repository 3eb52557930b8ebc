"""The settings of `rlhf chat`."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import OF_PROMPTS, TemplateConfig
from rlhf_cli.config.evaluation import EvaluatedModelConfig
from rlhf_cli.config.rollout import SamplingConfig


class ChatConfig(CommandConfig):
    """Settings of `rlhf chat`."""

    unsupported = OF_PROMPTS | {"sampling.rollout_batch_size", "sampling.n_samples_per_prompt"}
    positional = "pretrain"

    model: EvaluatedModelConfig
    template: TemplateConfig = TemplateConfig()
    sampling: SamplingConfig = SamplingConfig()
