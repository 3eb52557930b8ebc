"""`rlhf sft`: supervised fine-tuning."""

from rlhf_cli.config.commands.sft import SFTConfig
from rlhf_cli.runs.launch import begin_ranks


def sft(config: SFTConfig) -> None:
    """Supervised fine-tuning on prompts with responses, conversations, or plain text."""
    begin_ranks(config.launch, config.tracking)

    from rlhf_cli.runs.offline.run import run_offline
    from rlhf_cli.runs.offline.sft import sft_task

    run_offline(config, sft_task(config))
