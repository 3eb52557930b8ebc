"""`rlhf chat`: chat with one or more models in the terminal."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.data import OF_PROMPTS, TemplateConfig
from rlhf_cli.config.evaluation import EvaluatedModelConfig
from rlhf_cli.config.rollout import SamplingConfig


class ChatConfig(CommandConfig):
    """Chat with a model in the terminal. Responses are streamed; /help lists the chat commands.

    PRETRAIN is a model, run directory, adapter or checkpoint. To compare models, separate them with commas. If stdin is
    not a terminal, each input line is a message, and only the responses are written to stdout.
    """

    unsupported = OF_PROMPTS | {"sampling.rollout_batch_size", "sampling.n_samples_per_prompt"}
    positional = "pretrain"
    example = 'runs/sft,runs/grpo --temperature 0.7 --max_new_tokens 512 --system_prompt "Answer briefly."'

    model: EvaluatedModelConfig
    template: TemplateConfig = TemplateConfig()
    sampling: SamplingConfig = SamplingConfig()
