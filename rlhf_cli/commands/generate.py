"""`rlhf generate`: sample responses to prompts, score and select them."""

from rlhf_cli.config.commands.generate import GenerateConfig


def generate(config: GenerateConfig) -> None:
    """Sample responses to prompts, score them, and select the best, or pairs of best and worst, for training."""
    from rlhf_cli.runs.inference.generate import run_generation

    run_generation(config)
