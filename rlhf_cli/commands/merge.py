"""`rlhf merge`: a whole Hugging Face model from an adapter or a checkpoint."""

from rlhf_cli.config.commands.merge import MergeConfig


def merge(config: MergeConfig) -> None:
    """Fold an adapter into its model, or turn a checkpoint into a Hugging Face folder, and read the result again."""
    from rlhf_cli.runs.merge import run_merge

    print(run_merge(config.merge))
