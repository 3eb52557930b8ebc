"""Sequence-parallel ranks, according to the settings."""

from transformers import PretrainedConfig

from rlhf_cli.backends.training import distributed
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.sequence_parallel.checks import chosen_mode
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks


def sequence_ranks(settings: DeepSpeedConfig, architecture: PretrainedConfig) -> SequenceRanks | None:
    """Return the ranks that share sequences with this one, or None without sequence parallelism.

    Call it on all ranks.
    """
    group = distributed.sequence_group(settings.sequence_parallel_size)
    return None if group is None else SequenceRanks(group, chosen_mode(architecture, settings))
