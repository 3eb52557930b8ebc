"""Choose gradient checkpointing and the micro-batch size for a GPU's memory.

The constants come from counting live bytes on fake CUDA tensors (Qwen2 0.5B, 1.5B and 7B) and are accurate to 10%.
Fused kernels keep less, so real runs may have more room.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.models.cost import active_width, num_recurrent_layers

GIB = 2**30
_FEW_TOKENS = 8192
"""Micro-batches with fewer tokens slow a GPU down more than recomputing layers does."""
_STEP = 512
"""Token limits are multiples of this."""
KEPT_OF_HIDDEN, _KEPT_OF_WIDTH = 12, 4
"""Activations kept per layer and token for the backward pass, in multiples of the hidden size and of the MLP width."""
_OVERHEAD = 3 * GIB
"""CUDA context, gradient buckets, logits, and memory of sleeping engines on the same GPU."""
_USABLE = 0.95
"""Usable fraction of GPU memory; the rest is lost to fragmentation."""


@dataclass(frozen=True)
class Fit:
    """Whether to use gradient checkpointing, tokens per micro-batch, and a one-line reason (empty without a GPU)."""

    recomputes: bool
    max_tokens: int
    reason: str = ""


@dataclass(frozen=True)
class States:
    """Bytes per parameter for weights, and for the rest of the training state: copies, moments, gradient sums.

    The rest is sharded over `ranks`, and weights too if `partitioned`. An adapter's state is negligible.
    """

    weight_bytes: int
    rest_bytes: int
    ranks: int = 1
    partitioned: bool = False

    def num_bytes(self, num_parameters: int) -> float:
        """Return the bytes per GPU."""
        weights = self.weight_bytes / (self.ranks if self.partitioned else 1)
        return num_parameters * (weights + self.rest_bytes / self.ranks)


def kept_bytes(config: PretrainedConfig, *, value_bytes: int) -> int:
    """Return the activation bytes per token without gradient checkpointing."""
    text = config.get_text_config()
    values = text.num_hidden_layers * _layer_values(text) + num_recurrent_layers(text) * recurrent_values(text)
    return int(values * value_bytes)


def recomputed_bytes(config: PretrainedConfig, *, value_bytes: int) -> int:
    """Return the activation bytes per token with gradient checkpointing: all layer inputs, plus the largest layer."""
    text = config.get_text_config()
    largest = _layer_values(text) + (recurrent_values(text) if num_recurrent_layers(text) else 0)
    return int((text.num_hidden_layers * text.hidden_size + largest) * value_bytes)


def _layer_values(text: PretrainedConfig) -> int:
    """Return the values that a layer with attention or a short convolution keeps per token."""
    return int(KEPT_OF_HIDDEN * text.hidden_size + _KEPT_OF_WIDTH * active_width(text))


def recurrent_values(text: PretrainedConfig) -> int:
    """Return the values that a recurrent layer keeps per token in addition to `_layer_values`.

    Measured on bf16 tensors that PyTorch code saves, most of them float32. Kernels save fewer. The delta rules compute
    with chunks of 64 tokens.
    """
    sizes = text.to_dict()

    def size(*names: str) -> int:
        return int(next((sizes[name] for name in names if sizes.get(name)), 0))

    heads, state = size("mamba_n_heads", "mamba_num_heads"), size("mamba_d_state", "ssm_state_size")
    if heads:
        inner, chunk = heads * size("mamba_d_head", "mamba_head_dim"), size("mamba_chunk_size", "chunk_size")
        return 26 * inner + 6 * heads * chunk + 12 * heads * state
    if state:
        return size("mamba_expand") * text.hidden_size * (14 + 7 * state)
    delta = size("linear_num_value_heads") * (18 * size("linear_key_head_dim") + 29 * size("linear_value_head_dim"))
    # Kimi-Linear has a decay for each channel.
    return delta or 490 * size("linear_num_heads") * size("linear_head_dim")


def num_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> int:
    """Count a language model's parameters, including all experts, without allocating weights."""
    # Loading imports torch and DeepSpeed, which take seconds.
    import torch

    from rlhf_cli.models.compat import without_partitions
    from rlhf_cli.models.loading import language_model_class

    with without_partitions(), torch.device("meta"):
        counted = language_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in counted.parameters())


def fit_to_memory(
    config: PretrainedConfig,
    *,
    gpu_bytes: float,
    states: States,
    needed_tokens: int,
    recomputes: bool | None = None,
    max_tokens: int | None = None,
    value_bytes: int = 2,
    trust_remote_code: bool = False,
) -> Fit:
    """Choose gradient checkpointing and tokens per micro-batch. Values that are passed in are kept.

    Without checkpointing, packs of 8,192 tokens or the default must fit: recomputation costs a third more compute.

    Args:
        gpu_bytes: GPU memory available to the model during training.
        needed_tokens: length of the longest sequence, which always goes into one micro-batch.
        value_bytes: bytes per value in the weight dtype.
    """
    size = states.num_bytes(num_parameters(config, trust_remote_code=trust_remote_code))
    free = max(0.0, _USABLE * gpu_bytes - _OVERHEAD - size)
    kept, again = kept_bytes(config, value_bytes=value_bytes), recomputed_bytes(config, value_bytes=value_bytes)
    wanted = max_tokens or DEFAULT_TOKENS
    enough = wanted if max_tokens else max(min(wanted, needed_tokens), _FEW_TOKENS)
    if recomputes is None:
        # Without checkpointing, too few tokens would fit to keep the GPU busy.
        recomputes = free // kept < enough
    room = int(free // (again if recomputes else kept))
    # Whole STEPs, but never less than the longest sequence: it cannot be split.
    tokens = max_tokens or max(min(wanted, room // _STEP * _STEP), min(wanted, needed_tokens), _STEP)
    memory = f"states {size / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB, activations {kept / 2**20:.1f} MiB per token"
    mode = f"gradient checkpointing on ({again / 2**20:.2f} MiB)" if recomputes else "gradient checkpointing off"
    warning = "" if room >= tokens else f", BUT ONLY ABOUT {room:,} TOKENS FIT"
    return Fit(recomputes, tokens, f"{memory}; {mode}, up to {tokens:,} tokens per micro-batch{warning}")
