"""Memory of a process that samples: weights, KV cache and the sequences that run at once."""

from dataclasses import dataclass

from rlhf_cli.config.rollout import CPU_CACHE_GIB
from rlhf_cli.planning.memory import CONTEXT, GIB, GRAPHS, Parts
from rlhf_cli.planning.shapes import ModelShape

_WORKSPACE = 1.5 * GIB
"""Activations and sampling buffers of vLLM in its largest step, without CUDA graphs."""
_LARGE_GPU, _MANY_SEQUENCES, _SEQUENCES = 70 * GIB, 1024, 256
"""vLLM's defaults for `max_num_seqs`, on GPUs with at least 70 GiB and on others."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """A rollout engine on each of its `size` GPUs.

    - `share`: fraction of `gpu_bytes` that the engine may use.
    - `requests`: responses of an iteration over all engines.
    - `other_weights`: bytes of other models in the same process.
    - `activations`: bytes of the longest prompt's activations in a model of transformers that a command loads itself.
    - `num_sequences`: limit for sequences that run at once, None for vLLM's default.

    Example: Qwen2.5-7B in bf16 has 56 KiB of KV cache per token, so 40 GiB hold 748,982 tokens.
    """

    shape: ModelShape
    gpu_bytes: float
    share: float
    size: int
    value_bytes: int
    max_len: int
    requests: int
    other_weights: float = 0
    activations: float = 0
    num_sequences: int | None = None
    is_eager: bool = False
    is_vllm: bool = True
    has_gpus: bool = True

    @property
    def weights(self) -> float:
        """Bytes of weights per GPU."""
        return self.shape.parameters * self.value_bytes / self.size

    @property
    def all_weights(self) -> float:
        """Bytes of weights on all GPUs, which a sleeping engine without pushes keeps in host memory."""
        return self.weights * self.size

    @property
    def _rest(self) -> float:
        workspace = 0 if self.activations else _WORKSPACE
        return (CONTEXT if self.has_gpus else 0) + workspace + (0 if self.is_eager else GRAPHS)

    @property
    def cache(self) -> float:
        """Bytes of KV cache per GPU; negative if the weights do not fit."""
        if not self.has_gpus or not self.is_vllm:
            # As large as the sequences need; the transformers engine's grows with them, and holds at least one.
            sequence = self.max_len * self.token_bytes
            needed = self.max_sequences * sequence
            limited = needed if self.has_gpus else min(needed, CPU_CACHE_GIB * GIB)
            return limited if self.is_vllm else max(sequence, limited)
        return self.share * self.gpu_bytes - self.weights - self._rest

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token and GPU. Key heads are copied if there are more GPUs than heads."""
        split = min(self.size, self.shape.key_heads)
        return self.shape.cache_values * self.value_bytes / split

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit in the KV cache."""
        return max(0, int(self.cache // self.token_bytes)) if self.token_bytes else self.max_sequences * self.max_len

    @property
    def max_sequences(self) -> int:
        """Limit for sequences that run at once."""
        default = _MANY_SEQUENCES if self.has_gpus and self.gpu_bytes > _LARGE_GPU else _SEQUENCES
        most = self.num_sequences or default
        # The transformers engine has one row per response.
        return most if self.is_vllm else min(most, self.requests)

    def running(self, length: float) -> int:
        """Return the sequences of a mean length that run at once."""
        return min(self.max_sequences, int(self.cache_tokens / length))

    @property
    def fits(self) -> bool:
        """Whether weights and one sequence of maximum length fit."""
        return self.cache_tokens >= self.max_len

    def generating(self) -> Parts:
        """Return the memory of a running engine."""
        rest = self._rest if self.has_gpus else 0
        weights, cache = self.weights + self.other_weights, max(0.0, self.cache)
        return {"weights": weights, "activations": self.activations, "cache": cache, "processes": rest}

    def receiving(self) -> Parts:
        """Return the memory while weights are pushed, before the KV cache is allocated."""
        return {"weights": self.weights, "processes": self._rest if self.has_gpus else 0}

    def asleep(self) -> Parts:
        """Return the memory that a sleeping engine keeps."""
        return {"processes": CONTEXT + (0 if self.is_eager else GRAPHS)}
