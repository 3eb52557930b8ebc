"""How long a sequence may be, which one rank or several ranks hold, as a number and in words; who splits layers."""

from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig


def tokens_of_sequence(batch: BatchConfig, settings: DeepSpeedConfig) -> int:
    """Return the tokens that a sequence may have, which is in a micro-batch as a whole."""
    return batch.max_tokens * settings.sequence_parallel_size


def sharing(batch: BatchConfig, settings: DeepSpeedConfig, *, of: str = "") -> list[str]:
    """Return a text if several ranks share each sequence: their number, and the tokens that a sequence may have."""
    size = settings.sequence_parallel_size
    if size == 1:
        return []
    roles = f" of {of}" if of else ""
    return [f"{size} ranks share each sequence{roles}, which may have {tokens_of_sequence(batch, settings):,} tokens"]


def splitting(settings: DeepSpeedConfig, *, of: str = "the model") -> list[str]:
    """Return a text if several ranks split the layers of a trained model."""
    size = settings.tensor_parallel_size
    return [f"{size} ranks split the layers of {of} (experimental)"] if size > 1 else []
