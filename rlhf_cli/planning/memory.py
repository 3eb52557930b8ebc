"""Bytes on a GPU and in host memory: states as DeepSpeed 0.19.8 allocates them, activations, logits, buffers.

The same functions choose gradient checkpointing and micro-batches of a run, and make `rlhf plan`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_cli.backends.training.deepspeed_config import OPTIMIZER_BYTES, reduce_buckets
from rlhf_cli.config.train import DEFAULT_TOKENS, DeepSpeedConfig, OptimizerName
from rlhf_cli.models.logit_sizes import BLOCK_BYTES, CHUNK_BYTES
from rlhf_cli.planning.shapes import ModelShape

GIB = 2**30
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
FOUR_BIT_BYTES = 0.6
"""Bytes per parameter of a model in NF4 with double quantization, including its layers in 16 bits."""
CONTEXT = 0.55 * GIB
"""CUDA context and cuBLAS workspace of a process, on Hopper."""
COMMUNICATORS = 0.9 * GIB
"""NCCL buffers of a role with several GPUs; an assumption, not measured."""
GRAPHS = 1.5 * GIB
"""Memory that a sleeping vLLM engine keeps besides its context: CUDA graphs and buffers."""
USABLE = 0.95
"""Usable fraction of the memory of a GPU or host: the rest is lost to fragmentation or belongs to other programs."""
_FEW_TOKENS = 8192
"""Micro-batches with fewer tokens slow a GPU down more than recomputing layers does."""
TOKEN_STEP = 512
"""Token limits are multiples of this."""
_GATHERED = 1_000_000_000
"""DeepSpeed's default for the parameters that ZeRO-3 keeps gathered at a time (`stage3_max_live_parameters`)."""
_CPU_COPIES = 3
"""Flat copies of weights and gradients that DeepSpeed keeps with ZeRO in a process on a CPU, except for float32 weights
at stages 1 and 2 (docs/howto/one-gpu.md)."""
_CPU_GAPS = 1.4
"""Host memory per byte of activations on a CPU. Before version 2.38, glibc cannot reuse a freed block for an aligned
one of the same size, so gaps remain in each layer (docs/benchmarks.md)."""
_SCORE_BYTES = 8
"""Bytes that eager attention keeps per score: tanh and rounded weights in bf16, and weights in float32."""
_STATES = 6
"""Hidden sizes per token around the head: hidden states in float32 and bf16, and their gradients."""

Parts = dict[str, float]
"""Bytes by part: weights, gradients, optimizer, activations, logits, buffers, cache, processes."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """A model and the settings that determine its memory on each GPU of its ranks.

    - `num_trained`: trained parameters; 0 if frozen, few with an adapter.
    - `weight_bytes`: bytes per parameter. `value_bytes`: bytes per activation.
    - `has_gpus`: False in processes on a CPU.
    - `is_fused`: whether layers use Liger's kernels, if there are any for this model.
    - `keeps_scores`: whether attention with a softcap is eager, for lack of another kernel.
    - `num_blocks`: float32 logit blocks that exist at a time: logits and their gradient; with an entropy bonus, also
      log-probs.

    Example: Qwen2.5-7B with AdamW and ZeRO-2 on 8 GPUs has 15.2 GB of weights and (4 + 12) * 7.6 / 8 = 15.2 GB of
    gradients and optimizer states on each.
    """

    shape: ModelShape
    num_trained: int = 0
    num_ranks: int = 1
    settings: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    optimizer: OptimizerName = "adamw"
    weight_bytes: float = 2
    value_bytes: int = 2
    offloads_activations: bool = False
    has_gpus: bool = True
    is_fused: bool = False
    keeps_scores: bool = False
    num_blocks: int = 2

    @property
    def _split(self) -> int:
        """Ranks that split the layers of this model."""
        return self.settings.tensor_parallel_size if self.num_trained else 1

    @property
    def _shards(self) -> int:
        """Ranks that partition states."""
        return self.num_ranks // self._split

    @property
    def weights(self) -> float:
        """Bytes of resident weights."""
        if self.settings.param_offload:
            return 0  # each layer is on the GPU only when it is used
        whole = self.shape.parameters * self.weight_bytes / self._split
        return whole / self._shards if self.settings.zero_stage == 3 else whole

    @property
    def gradients(self) -> float:
        """Bytes of gradient sums between micro-batches; offloaded AdamW keeps them in host memory."""
        if self.settings.adam_offload:
            return 0
        shards = self._shards if self.settings.zero_stage >= 2 else 1
        return self.num_trained * self._sum_bytes / self._split / shards

    @property
    def _sum_bytes(self) -> int:
        if self.settings.grad_accum_dtype is not None:
            return WEIGHT_BYTES[self.settings.grad_accum_dtype]
        in_bf16 = self.optimizer == "adamw_bf16" or (self.settings.zero_stage == 0 and self.weight_bytes == 2)
        return 2 if in_bf16 else 4

    @property
    def optimizer_states(self) -> float:
        """Bytes of master weights and moments."""
        if self.settings.adam_offload:
            return 0
        shards = self._shards if self.settings.zero_stage else 1
        # At stage 0, AdamW updates float32 weights in place.
        is_in_place = self.settings.zero_stage == 0 and self.weight_bytes == 4 and self.optimizer == "adamw"
        master = 4 if is_in_place or self._is_plain_on_cpu else 0
        return self.num_trained * (OPTIMIZER_BYTES[self.optimizer] - master) / self._split / shards

    @property
    def _is_plain_on_cpu(self) -> bool:
        """Whether float32 weights are master weights too, as in `fit_to_partitions`."""
        in_parts = self.settings.zero_stage in (1, 2) and not self.settings.adam_offload
        return in_parts and not self.has_gpus and self.value_bytes == 4

    @property
    def buffers(self) -> float:
        """Bytes of reduction buckets, and of weights that are gathered at a time."""
        found = 0.0
        if self.num_trained and self.settings.zero_stage:
            number, size = reduce_buckets(self.settings, num_gpus=self.num_ranks if self.has_gpus else 0)
            found += number * size * self.value_bytes
        if self.num_trained and self.settings.zero_stage and not self.has_gpus:
            found += self._cpu_copies * self.num_trained * self.value_bytes
        if self.settings.zero_stage == 3 or self.settings.param_offload:
            gathered = min(self.shape.parameters, _GATHERED) + self.shape.largest
            found += gathered * self.weight_bytes / self._split
        return found

    @property
    def _cpu_copies(self) -> int:
        if not self._is_plain_on_cpu:
            return _CPU_COPIES
        # Muon's gradients are summed in parts, and copied into one tensor for the step.
        return 1 if self.optimizer == "muon" else 0

    @property
    def states(self) -> float:
        """Bytes of weights, gradients, optimizer states and buffers."""
        return self.weights + self.gradients + self.optimizer_states + self.buffers

    def token_bytes(self, *, recomputes: bool) -> int:
        """Return the activation bytes per token that wait for the backward pass."""
        shape = self.shape
        if not recomputes:
            return (shape.kept_values - shape.layers * self._saved) * self.value_bytes
        waiting = 0 if self.offloads_activations else self._layer_inputs
        return (waiting + shape.layer_values - self._saved) * self.value_bytes

    @property
    def _layer_inputs(self) -> int:
        """Values per token that gradient checkpointing keeps of all layers."""
        return self.shape.recomputed_values - self.shape.layer_values

    def offloaded_inputs(self, num_tokens: float) -> float:
        """Return the host bytes of all ranks for the layer inputs of a micro-batch, until its backward pass."""
        if not self.offloads_activations:
            return 0.0
        return self.num_ranks * num_tokens * self._layer_inputs * self.value_bytes

    @property
    def _saved(self) -> int:
        return self.shape.fused_savings if self.is_fused else 0

    @property
    def layer_bytes(self) -> int:
        """Return the activation bytes per token that the largest layer keeps."""
        return (self.shape.layer_values - self._saved) * self.value_bytes

    def scores(self, num_tokens: float) -> float:
        """Return the bytes of attention scores that a layer keeps, of all tokens in a pack with each other."""
        return _SCORE_BYTES * self.shape.capped_heads * num_tokens**2 if self.keeps_scores else 0

    def logits(self, num_tokens: float, *, trains: bool) -> float:
        """Return the bytes around the head: chunks of logits, gradients in float32 and per chunk, states."""
        place = "cuda" if self.has_gpus else "cpu"
        product = num_tokens * self.shape.vocabulary * self.value_bytes
        # A softcap of logits, which such models have too, needs one more.
        num_blocks = self.num_blocks + (self.shape.capped_heads > 0)
        blocks = num_blocks * min(num_tokens * self.shape.vocabulary * 4, BLOCK_BYTES[place])
        chunk = min(product, CHUNK_BYTES[place])
        if not trains or self.num_trained < self.shape.head:
            return chunk + blocks
        if not self.has_gpus:
            return chunk + blocks + 4 * self.shape.head
        states = num_tokens * _STATES * self.shape.hidden * self.value_bytes
        gradient = self.value_bytes * self.shape.head
        if product <= CHUNK_BYTES[place]:
            return chunk + max(blocks, gradient) + states
        # A chunk's gradients exist with the sum, and at the first sum, also in float32.
        return chunk + max(blocks, 2 * gradient) + 4 * self.shape.head + states

    @property
    def process(self) -> float:
        """Bytes of CUDA context and communicators of one rank."""
        return (CONTEXT + (COMMUNICATORS if self.num_ranks > 1 else 0)) if self.has_gpus else 0

    def resident(self) -> Parts:
        """Return the memory of an idle role that does not sleep."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer_states,
            "buffers": self.buffers,
            "processes": self.process,
        }

    def training(self, num_tokens: float, *, recomputes: bool) -> Parts:
        """Return the peak during forward and backward passes of a micro-batch."""
        scores = self.scores(num_tokens)
        activations = num_tokens * self.token_bytes(recomputes=recomputes)
        activations += scores * (1 if recomputes else self.shape.attention_layers)
        logits = self.logits(num_tokens, trains=True)
        if self.has_gpus:
            # Logits are freed before the backward pass of the layers, which recomputes one at a time.
            layer = num_tokens * self.layer_bytes + scores
            activations -= layer if recomputes else 0
            backward = recomputes * layer + self._backward(num_tokens) + self._head_gradient
            activations, logits = (activations, logits) if logits > backward else (activations + backward, 0)
        else:
            activations *= _CPU_GAPS
        return {**self.resident(), "activations": activations, "logits": logits}

    def _backward(self, num_tokens: float) -> float:
        """Return the bytes of gradients in a layer: of activations, or of stacked experts if these are larger."""
        values = self.shape.fused_backward_values if self.is_fused else self.shape.backward_values
        stack = self.shape.largest if self.num_trained >= self.shape.largest > self.shape.head > 0 else 0
        return max(num_tokens * values, stack) * self.value_bytes

    @property
    def _head_gradient(self) -> float:
        """Bytes of the gradient of a tied head, which waits for the gradient of the embedding."""
        is_trained = self.num_trained >= self.shape.head and self.shape.has_tied_head
        return self.shape.head * self.value_bytes if is_trained else 0

    def forward(self, num_tokens: float) -> Parts:
        """Return the peak during a forward pass without gradients."""
        # Within a layer, about half of the values that training would keep exist at a time.
        layer = num_tokens * self.layer_bytes + self.scores(num_tokens)
        activations = num_tokens * 2 * self.shape.hidden * self.value_bytes + layer / 2
        activations *= 1 if self.has_gpus else _CPU_GAPS
        return {**self.resident(), "activations": activations, "logits": self.logits(num_tokens, trains=False)}

    def asleep(self) -> Parts:
        """Return the memory that a sleeping role keeps on its GPU: states that DeepSpeed cannot move, and processes."""
        if self.num_trained and not self.moves_trained:
            share = self.num_trained / self.shape.parameters
            moved = {"weights": self.weights * share, "gradients": self.gradients, "optimizer": self.optimizer_states}
            return {**moved, "buffers": self.buffers, "processes": self.process}
        return {"processes": self.process}

    @property
    def moves_trained(self) -> bool:
        """Whether DeepSpeed offloads trained weights and states: not at ZeRO-0, and not in `BF16_Optimizer`."""
        # DeepSpeed's BF16_Optimizer, used at stage 1 with bf16 weights, cannot offload its state.
        is_apart = self.weight_bytes == 4 or self.optimizer == "adamw_bf16"
        return self.settings.zero_stage >= 2 or (self.settings.zero_stage == 1 and is_apart)

    @property
    def sleeping_bytes(self) -> float:
        """Pinned host bytes of all ranks while the role sleeps. Weights are partitioned only at ZeRO-3."""
        num_moved = self.shape.parameters - (0 if self.moves_trained else self.num_trained)
        copies = 1 if self.settings.zero_stage == 3 else self._shards
        on_gpu = self.moves_trained and not self.settings.adam_offload
        moved = OPTIMIZER_BYTES[self.optimizer] * self.num_trained if on_gpu else 0
        return num_moved * self.weight_bytes * copies + moved

    @property
    def offloaded_bytes(self) -> float:
        """Host bytes of all ranks for offloaded optimizer states, their gradients, and offloaded weights."""
        found = 0.0
        if self.settings.adam_offload:
            found += self.num_trained * (OPTIMIZER_BYTES[self.optimizer] + 4)
        if self.settings.param_offload:
            copies = 1 if self.settings.zero_stage == 3 else self.num_ranks
            found += self.shape.parameters * self.weight_bytes * copies
        return found

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: trained weights and optimizer states."""
        return self.num_trained * (self.value_bytes + OPTIMIZER_BYTES[self.optimizer])


def total(parts: Mapping[str, float]) -> float:
    """Return the sum of all parts."""
    return sum(parts.values())


def added(*several: Mapping[str, float]) -> Parts:
    """Return the sum of memory by part."""
    names = dict.fromkeys(name for parts in several for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in several) for name in names}


@dataclass(frozen=True)
class Fit:
    """Whether to use gradient checkpointing, tokens per micro-batch, and a one-line reason."""

    recomputes: bool
    max_tokens: int
    reason: str


def fit_to_memory(
    role: RoleMemory,
    *,
    room: float,
    needed_tokens: int,
    recomputes: bool | None = None,
    max_tokens: int | None = None,
) -> Fit:
    """Choose gradient checkpointing and tokens per micro-batch. Values that are passed in are kept.

    Without checkpointing, packs of 8,192 tokens or the default must fit: recomputation costs a third more compute.

    Args:
        room: bytes of GPU memory available to the role during training.
        needed_tokens: length of the longest sequence, which always goes into one micro-batch.
    """
    wanted = max_tokens or DEFAULT_TOKENS
    states = role.states + role.process
    free = max(0.0, USABLE * room - states)
    kept, again = role.token_bytes(recomputes=False), role.token_bytes(recomputes=True)
    enough = wanted if max_tokens else max(min(wanted, needed_tokens), _FEW_TOKENS)
    if recomputes is None:
        # Without checkpointing, too few tokens would fit to keep the GPU busy.
        recomputes = not _fits(role, free, enough, recomputes=False)
    num_fit = _largest(role, free, wanted, recomputes=recomputes)
    # Whole STEPs, but never less than the longest sequence: it cannot be split.
    tokens = max_tokens or max(num_fit, min(wanted, needed_tokens), TOKEN_STEP)
    memory = f"states {states / GIB:.1f} of {room / GIB:.0f} GiB, activations {kept / 2**20:.1f} MiB per token"
    mode = f"gradient checkpointing on ({again / 2**20:.2f} MiB)" if recomputes else "gradient checkpointing off"
    warning = "" if num_fit >= tokens else f", BUT ONLY ABOUT {num_fit:,} TOKENS FIT"
    return Fit(recomputes, tokens, f"{memory}; {mode}, up to {tokens:,} tokens per micro-batch{warning}")


def _fits(role: RoleMemory, free: float, num_tokens: int, *, recomputes: bool) -> bool:
    parts = role.training(num_tokens, recomputes=recomputes)
    return parts["activations"] + parts["logits"] <= free


def _largest(role: RoleMemory, free: float, most: int, *, recomputes: bool) -> int:
    """Return the largest multiple of 512 up to `most` whose activations and logits fit, or `most` if it fits."""
    if _fits(role, free, most, recomputes=recomputes):
        return most
    # A linear search is too slow for the hundreds of layouts of a plan. False sorts before True.
    sizes = range(TOKEN_STEP, most + 1, TOKEN_STEP)
    return TOKEN_STEP * bisect_left(sizes, True, key=lambda size: not _fits(role, free, size, recomputes=recomputes))
