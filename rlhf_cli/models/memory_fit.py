"""Whether layers are recomputed, and how many tokens a micro-batch has, by the memory of a GPU: a pure function.

The numbers come from counting live bytes on fake CUDA tensors (Qwen2 of 0.5B, 1.5B and 7B), which they meet within a
tenth. Kernels that fuse operations keep less, so a run may have more room than this counts.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from rlhf_cli.config.train import DEFAULT_TOKENS
from rlhf_cli.models.cost import active_width

GIB = 2**30
FEW_TOKENS = 8192
"""Tokens below which a micro-batch is small enough to slow a GPU down more than recomputing layers does."""
STEP = 512
"""Bounds are whole multiples of this."""
KEPT_OF_HIDDEN, KEPT_OF_WIDTH = 12, 4
"""Values that a layer keeps of each token for the backward pass, in units of its hidden size and of its MLP's width."""
OVERHEAD = 3 * GIB
"""Context of CUDA, buckets of gradients, logits, and the rest of engines that sleep on the same GPU."""
USABLE = 0.95
"""Share of a GPU's memory that an allocator can use: the rest is lost in fragments."""


@dataclass(frozen=True)
class Fit:
    """Whether layers are recomputed, tokens of a micro-batch, and the reason in a line (empty without a GPU)."""

    recomputes: bool
    max_tokens: int
    reason: str = ""


@dataclass(frozen=True)
class States:
    """Bytes a parameter of weights, and of the rest that training keeps: copies, moments, sums of gradients.

    `ranks` share the rest, and weights too if `partitioned`. An adapter has no rest worth counting.
    """

    weight_bytes: int
    rest_bytes: int
    ranks: int = 1
    partitioned: bool = False

    def num_bytes(self, num_parameters: int) -> float:
        """Return the bytes on each GPU."""
        weights = self.weight_bytes / (self.ranks if self.partitioned else 1)
        return num_parameters * (weights + self.rest_bytes / self.ranks)


def kept_bytes(config: PretrainedConfig, *, value_bytes: int) -> int:
    """Return the bytes that the layers keep of each token without recomputing."""
    text = config.get_text_config()
    values = KEPT_OF_HIDDEN * text.hidden_size + KEPT_OF_WIDTH * active_width(text)
    return int(text.num_hidden_layers * values * value_bytes)


def recomputed_bytes(config: PretrainedConfig, *, value_bytes: int) -> int:
    """Return the bytes of each token with recomputing: the inputs of all layers, and one layer at a time as a whole."""
    text = config.get_text_config()
    one = kept_bytes(config, value_bytes=value_bytes) // text.num_hidden_layers
    return int(text.num_hidden_layers * text.hidden_size * value_bytes) + one


def num_parameters(config: PretrainedConfig) -> int:
    """Return the parameters of a language model by its sizes, without making any; all experts of a mixture count."""
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    key_value = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size
    attention = 2 * hidden * (text.num_attention_heads * head_size + key_value)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    width = active_width(text)
    if experts:
        width = int(experts * width / text.num_experts_per_tok)
    embeddings = (1 if text.tie_word_embeddings else 2) * hidden * text.vocab_size
    return int(layers * (attention + 3 * hidden * width) + embeddings)


def fit_to_memory(
    config: PretrainedConfig,
    *,
    gpu_bytes: float,
    states: States,
    needed_tokens: int,
    recomputes: bool | None = None,
    max_tokens: int | None = None,
    value_bytes: int = 2,
) -> Fit:
    """Return whether layers are recomputed and how many tokens a micro-batch has; given values are kept.

    Layers are kept if packs of 8,192 tokens, or the default, fit with them: recomputing takes a third more compute.

    Args:
        gpu_bytes: memory of a GPU that the model may use while it trains.
        needed_tokens: tokens of the longest sequence, which a micro-batch holds in any case.
        value_bytes: bytes of a value in the type of the weights.
    """
    size = states.num_bytes(num_parameters(config))
    free = max(0.0, USABLE * gpu_bytes - OVERHEAD - size)
    kept, again = kept_bytes(config, value_bytes=value_bytes), recomputed_bytes(config, value_bytes=value_bytes)
    wanted = max_tokens or DEFAULT_TOKENS
    enough = wanted if max_tokens else max(min(wanted, needed_tokens), FEW_TOKENS)
    if recomputes is None:
        recomputes = free // kept < enough
    room = int(free // (again if recomputes else kept))
    found = max_tokens or max(min(wanted, room // STEP * STEP), min(wanted, needed_tokens), STEP)
    where = f"states {size / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB, activations {kept / 2**20:.1f} MiB a token"
    way = f"layers are recomputed ({again / 2**20:.2f} MiB)" if recomputes else "layers are kept"
    room_note = "" if room >= found else f", OF WHICH ABOUT {room:,} TOKENS FIT"
    return Fit(recomputes, found, f"{where}; {way}, micro-batches have up to {found:,} tokens{room_note}")
