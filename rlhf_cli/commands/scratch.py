"""`rlhf scratch`: create a small untrained model, with a tokenizer trained on a dataset."""

from rlhf_cli.config.commands.scratch import ScratchConfig


def scratch(config: ScratchConfig) -> None:
    """Create a small untrained model and tokenizer, for tests without downloads."""
    from rlhf_cli.runs.scratch import run_scratch

    print(run_scratch(config))
