"""Which models and settings let ranks share a sequence, and what these ranks exchange."""

from typing import Any

from transformers import PretrainedConfig

from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.sequence_parallel.attention import check_ring_kernel
from rlhf_cli.models.sequence_parallel.shards import Mode
from rlhf_cli.models.vision.families.table import takes_pictures

POSITIONS_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary positions that depend on the longest position at hand, of which a rank sees only its own."""


def chosen_mode(architecture: PretrainedConfig, settings: DeepSpeedConfig) -> Mode:
    """Return what the ranks exchange: tokens for heads, unless the settings or the number of heads say otherwise."""
    if settings.ring_flash_attn:
        return "ring"
    if settings.sequence_parallel_mode != "auto":
        return settings.sequence_parallel_mode
    divides = architecture.get_text_config().num_attention_heads % settings.sequence_parallel_size == 0
    return "ulysses" if divides else "gather"


def can_share_prompts(attention: str | None, settings: DeepSpeedConfig) -> bool:
    """Return whether a pack may hold a prompt once for several responses: ring-flash-attn takes keys in order alone."""
    by_ring = settings.ring_flash_attn and settings.sequence_parallel_size > 1
    return attention == VARLEN and not by_ring


def check_sequence_parallel(
    architecture: PretrainedConfig,
    settings: DeepSpeedConfig,
    *,
    num_ranks: int,
    attention: str,
    name: str = "sequence_parallel_size",
) -> None:
    """Raise UsageError if ranks cannot share a sequence of this model as the settings request.

    Args:
        num_ranks: ranks of the model.
        name: the setting that says how many ranks share a sequence.
    """
    size, mode = settings.sequence_parallel_size, chosen_mode(architecture, settings)
    if size == 1:
        return
    if takes_pictures(architecture):
        raise UsageError(
            f"--{name}: ranks do not share sequences of vision-language models ({architecture.model_type})"
        )
    if num_ranks % size:
        raise UsageError(f"--{name} {size} does not divide the {num_ranks} ranks of the model")
    if attention != VARLEN:
        raise UsageError(f"--{name} goes with attn_implementation varlen, and this run takes {attention}")
    text = architecture.get_text_config()
    heads = text.num_attention_heads
    if mode == "ulysses" and heads % size:
        raise UsageError(
            f"--{name} {size} does not divide the model's {heads} attention heads: "
            "--sequence_parallel_mode gather takes any number"
        )
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = {str(kind.get("rope_type")) for kind in (rope, *rope.values()) if isinstance(kind, dict)}
    if found := sorted(kinds & POSITIONS_BY_LENGTH):
        raise UsageError(f"--{name}: rotary positions of type {found[0]} need the whole sequence")
    if mode == "ring":
        check_ring_kernel()


def check_whole_packs(settings: DeepSpeedConfig, *, aux_loss_coef: float, compile_model: bool) -> None:
    """Raise UsageError if ranks share sequences of which other settings need the whole on each rank."""
    if max(settings.sequence_sizes) == 1:
        return
    if aux_loss_coef:
        raise UsageError("--aux_loss_coef needs all tokens of a pack on each rank: drop --sequence_parallel_size")
    if compile_model:
        raise UsageError("compile_model does not go with --sequence_parallel_size: ranks exchange tokens in each layer")
