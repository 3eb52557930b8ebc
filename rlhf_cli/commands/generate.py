"""`rlhf generate`: sample, score and select responses."""

from rlhf_cli.config.commands.generate import GenerateConfig


def generate(config: GenerateConfig) -> None:
    """Sample responses to prompts, score them, and select training data: the best ones, or best-worst pairs."""
    from rlhf_cli.runs.inference.generate import run_generation

    run_generation(config)
