"""`rlhf merge`: create a Hugging Face model from an adapter or a checkpoint."""

from rlhf_cli.config.commands.merge import MergeConfig


def merge(config: MergeConfig) -> None:
    """Merge an adapter into the base model, or convert a checkpoint to a Hugging Face folder, and verify the result."""
    from rlhf_cli.runs.merge import run_merge

    print(run_merge(config.merge))
