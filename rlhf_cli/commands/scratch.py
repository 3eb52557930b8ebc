"""`rlhf scratch`: a small untrained model and its tokenizer, made from a data set."""

from rlhf_cli.config.commands.scratch import ScratchConfig


def scratch(config: ScratchConfig) -> None:
    """Make a small untrained model and tokenizer, to try things without downloading any."""
    from rlhf_cli.runs.scratch import run_scratch

    print(run_scratch(config))
