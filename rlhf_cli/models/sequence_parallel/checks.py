"""Check which models and settings support sequence parallelism, and choose the mode."""

from typing import Any

from transformers import PretrainedConfig

from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.attention.table import SINKS, attention_needs
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.mixers.layers import Layers, layers_of
from rlhf_cli.models.sequence_parallel.attention import check_ring_kernel
from rlhf_cli.models.sequence_parallel.shards import Mode
from rlhf_cli.models.vision.families.table import takes_pictures

_POSITIONS_BY_LENGTH = {"dynamic", "longrope"}
"""RoPE types that depend on the longest position in the input, of which each rank sees only a part."""


def chosen_mode(architecture: PretrainedConfig, settings: DeepSpeedConfig) -> Mode:
    """Return the sequence-parallel mode: ulysses by default, if the number of heads allows it."""
    if settings.ring_flash_attn:
        return "ring"
    if settings.sequence_parallel_mode != "auto":
        return settings.sequence_parallel_mode
    # Ulysses moves each token once per direction, gather moves all keys to all ranks.
    divides = architecture.get_text_config().num_attention_heads % settings.sequence_parallel_size == 0
    return "ulysses" if divides else "gather"


def can_share_prompts(attention: str | None, settings: DeepSpeedConfig, layers: Layers) -> bool:
    """Return whether packs may share a prompt between responses.

    ring-flash-attn only supports keys in order, and some recurrent layers cannot continue the state of a prompt.
    """
    by_ring = settings.ring_flash_attn and settings.sequence_parallel_size > 1
    return attention == VARLEN and not by_ring and layers.can_continue


def check_sequence_parallel(
    architecture: PretrainedConfig,
    settings: DeepSpeedConfig,
    *,
    num_ranks: int,
    attention: str,
    trust_remote_code: bool,
    name: str = "sequence_parallel_size",
) -> None:
    """Raise UsageError if the settings do not support sequence parallelism for this model.

    Args:
        num_ranks: number of model ranks.
        trust_remote_code: whether to run the model's own code.
        name: name of the setting, for messages.
    """
    size, mode = settings.sequence_parallel_size, chosen_mode(architecture, settings)
    if size == 1:
        return
    if takes_pictures(architecture):
        raise UsageError(f"--{name} is not supported for vision-language models ({architecture.model_type})")
    # Only here, because the model is built without weights to find its layers.
    if layers_of(architecture, trust_remote_code=trust_remote_code).mixers:
        raise UsageError(f"--{name}: {architecture.model_type} has layers whose state would cross the ranks")
    if num_ranks % size:
        raise UsageError(f"--{name} {size} does not divide the {num_ranks} ranks of the model")
    if attention != VARLEN:
        raise UsageError(f"--{name} requires attn_implementation varlen, but this run uses {attention}")
    text = architecture.get_text_config()
    heads = text.num_attention_heads
    if mode == "ulysses" and heads % size:
        raise UsageError(
            f"--{name} {size} does not divide the model's {heads} attention heads: "
            "--sequence_parallel_mode gather supports any number"
        )
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    # rope_parameters is a single dict, or one dict per layer type.
    kinds = {str(kind.get("rope_type")) for kind in (rope, *rope.values()) if isinstance(kind, dict)}
    if unsupported := sorted(kinds & _POSITIONS_BY_LENGTH):
        raise UsageError(f"--{name}: rotary positions of type {unsupported[0]} depend on the full sequence")
    if mode == "ring":
        if SINKS in attention_needs(architecture):
            raise UsageError(f"--ring_flash_attn has no attention sinks, which {text.model_type} needs: drop it")
        check_ring_kernel()


def check_whole_packs(sequence_parallel_size: int, *, aux_loss_coef: float, compile_model: bool) -> None:
    """Raise UsageError if sequence parallelism is combined with settings that need full packs on each rank."""
    if sequence_parallel_size == 1:
        return
    if aux_loss_coef:
        raise UsageError("--aux_loss_coef needs full packs on each rank: drop --sequence_parallel_size")
    if compile_model:
        raise UsageError(
            "compile_model cannot be combined with --sequence_parallel_size: ranks exchange tokens in each layer"
        )
