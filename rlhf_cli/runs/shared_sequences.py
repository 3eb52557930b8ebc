"""Sequence length limit with sequence parallelism, and descriptions of parallelism for the startup summary."""

from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig


def tokens_of_sequence(batch: BatchConfig, settings: DeepSpeedConfig) -> int:
    """Return the maximum tokens in a sequence."""
    # A sequence is never split over micro-batches, but over the ranks that share it.
    return batch.max_tokens * settings.sequence_parallel_size


def sharing(batch: BatchConfig, settings: DeepSpeedConfig, *, of: str = "") -> list[str]:
    """Describe sequence parallelism: number of ranks and maximum sequence length; [] without it."""
    size = settings.sequence_parallel_size
    if size == 1:
        return []
    roles = f" of {of}" if of else ""
    return [f"{size} ranks share each sequence{roles}, up to {tokens_of_sequence(batch, settings):,} tokens"]


def splitting(settings: DeepSpeedConfig, *, of: str = "the model") -> list[str]:
    """Describe tensor parallelism; [] without it."""
    size = settings.tensor_parallel_size
    return [f"{size} ranks split the layers of {of} (experimental)"] if size > 1 else []
