"""Trains LoRA adapters that share a frozen base model, one operation at a time, on one device.

Each adapter has its own factors, gradients and AdamW states. Activating an adapter puts its factors into the layers, so
memory is one base model plus the adapters. Factors are float32, also on a 16-bit base.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.tinker_losses import TARGETS, TinkerLoss
from rlhf_cli.backends.weight_sync.adapter_push import vllm_config
from rlhf_cli.config.model import LoraConfig, ModelConfig
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack, plan_packs
from rlhf_cli.errors import UsageError
from rlhf_cli.models.adapters import ACTIVE, file_name, load_with_adapter, plan_adapter, save_adapter, scales
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, persistent_buffers
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.merging import folded, in_folding_order
from rlhf_cli.models.mixers.remainders import with_remainders
from rlhf_cli.models.policy import PolicyModel

_A, _B = f".lora_A.{ACTIVE}.weight", f".lora_B.{ACTIVE}.weight"


@dataclass(frozen=True)
class Datum:
    """A sequence with what its loss reads.

    - `token_ids`: int32 [N].
    - `inputs`: `target_tokens` int64 and other loss inputs float32, each [N], or [N, K] with several targets per token.
    """

    token_ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AdapterShape:
    """Rank and layers of an adapter. Its output is multiplied by `alpha` / `rank`."""

    rank: int
    alpha: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class AdamStep:
    """Settings of one AdamW step. `grad_clip_norm` 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class AdapterWeights:
    """Factors of an adapter on the CPU, named as in PEFT files. Without factors, the base model."""

    alpha: float = 0.0
    factors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Adapter:
    """An adapter in training: factors by parameter name, and its optimizer."""

    shape: AdapterShape
    factors: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW

    @property
    def trained(self) -> list[nn.Parameter]:
        """Factors that the optimizer updates."""
        return [parameter for parameter in self.factors.values() if parameter.requires_grad]


class AdapterTrainer:
    """A base model and the operations on its adapters. Not thread-safe."""

    def __init__(self, model: ModelConfig, *, max_tokens: int) -> None:
        """Load the base model. `max_tokens` limits the tokens in a forward pass."""
        self._max_tokens = max_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Rank 1: the layers get the factors of other ranks below.
        plan = plan_adapter(model, LoraConfig(lora_rank=1), seed=0)
        assert plan is not None, "a rank is set"
        self.fingerprint = plan.fingerprint
        self.hf_model = load_with_adapter(load_causal_lm, model, plan, device=self.device)
        self.hf_model.to(self.device)
        self._policy = PolicyModel(self.hf_model)
        names = [name for name, _ in self.hf_model.named_parameters()]
        self._layers = {name.removesuffix(_A): self._layer(name.removesuffix(_A)) for name in names if _A in name}

    def _layer(self, name: str) -> Any:
        return self.hf_model.get_submodule(name)

    def new_adapter(self, shape: AdapterShape) -> Adapter:
        """Create an adapter that changes nothing yet: A is random, B is zero.

        Raises:
            UsageError: no layer is trained, or the rank is above that of all layers, which only costs memory.
        """
        bases = (layer.get_base_layer() for layer in self._layers.values())
        highest = max(min(base.in_features, base.out_features) for base in bases)
        if shape.rank > highest:
            raise UsageError(f"rank {shape.rank} is above {highest}, the highest rank of a layer in this model")
        generator = torch.Generator().manual_seed(shape.seed)
        factors: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            is_trained = shape.train_attn if _is_attention(name) else shape.train_mlp
            base = layer.get_base_layer()
            a_RI = torch.empty(shape.rank, base.in_features)
            # PEFT's initialization of A.
            nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)
            b_OR = torch.zeros(base.out_features, shape.rank)
            for suffix, factor in ((_A, a_RI), (_B, b_OR)):
                factors[name + suffix] = nn.Parameter(factor.to(self.device), requires_grad=is_trained)
        trained = [parameter for parameter in factors.values() if parameter.requires_grad]
        if not trained:
            raise UsageError("lora_config: train_attn and train_mlp select no layer of this model")
        return Adapter(shape, factors, torch.optim.AdamW(trained))

    def _activate(self, factors: Mapping[str, nn.Parameter], alpha: float) -> None:
        for name, layer in self._layers.items():
            layer.lora_A[ACTIVE].weight, layer.lora_B[ACTIVE].weight = factors[name + _A], factors[name + _B]
            layer.scaling[ACTIVE] = alpha / len(factors[name + _A])

    def _activate_weights(self, weights: AdapterWeights) -> None:
        found: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            base = layer.get_base_layer()
            # The base model is an adapter of rank 1 that changes nothing.
            for suffix, shape in ((_A, (1, base.in_features)), (_B, (base.out_features, 1))):
                factor = weights.factors[file_name(name + suffix)] if weights.factors else torch.zeros(shape)
                found[name + suffix] = nn.Parameter(factor.to(self.device), requires_grad=False)
        self._activate(found, weights.alpha)

    def forward_backward(
        self, adapter: Adapter, data: Sequence[Datum], loss: TinkerLoss, config: Mapping[str, float], *, backward: bool
    ) -> tuple[list[np.ndarray], float]:
        """Compute the loss, and with `backward` add its gradient to that of the adapter. A failed request adds nothing.

        Returns the log-probs of the targets (nats, float32, with the shape of each `target_tokens`) and the sum of the
        loss over all tokens.
        """
        self._activate(adapter.factors, adapter.shape.alpha)
        plan = plan_packs([len(datum.token_ids) for datum in data], max_tokens=self._max_tokens, num_ranks=1)[0]
        found: dict[int, np.ndarray] = {}
        total = 0.0
        self._policy.train(backward)
        with _gradients_kept(adapter), torch.set_grad_enabled(backward):
            for members in plan:
                chosen = [data[number] for number in members]
                logprobs = self._logprobs(chosen)
                losses = [
                    loss.function(row, _columns(datum, self.device), config).sum()
                    for row, datum in zip(logprobs, chosen, strict=True)
                ]
                part = torch.stack(losses).sum()
                if backward:
                    part.backward()
                total += float(part.detach())
                shapes = [datum.inputs[TARGETS].shape for datum in chosen]
                rows = [row.detach().cpu().numpy().reshape(shape) for row, shape in zip(logprobs, shapes, strict=True)]
                found |= dict(zip(members, rows, strict=True))
        return [found[number] for number in range(len(data))], total

    def _logprobs(self, data: Sequence[Datum]) -> list[torch.Tensor]:
        """Return the log-probs of all targets of each sequence, flattened."""
        packed = target_pack(data).to(self.device)
        logprobs_K, _ = self._policy(packed)
        return list(logprobs_K.split([datum.inputs[TARGETS].size for datum in data]))

    @torch.no_grad()
    def score(self, weights: AdapterWeights, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-prob of each token after the first, float32 [N - 1] in nats."""
        self._activate_weights(weights)
        self._policy.eval()
        datum = Datum(token_ids[:-1], {TARGETS: token_ids[1:].astype(np.int64)})
        (logprobs,) = self._logprobs([datum])
        scored: np.ndarray = logprobs.cpu().numpy()
        return scored

    def optim_step(self, adapter: Adapter, step: AdamStep) -> dict[str, float]:
        """Run one AdamW step with the accumulated gradient, and clear it. Returns the norm before clipping.

        Without a gradient, or with one that is not finite, nothing changes and `skipped` is 1.
        """
        gradients = [parameter.grad for parameter in adapter.trained if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        is_skipped = not gradients or not math.isfinite(norm)
        if not is_skipped:
            if step.grad_clip_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(adapter.trained, step.grad_clip_norm, torch.tensor(norm))
            for group in adapter.optimizer.param_groups:
                group |= {"lr": step.learning_rate, "betas": (step.beta1, step.beta2)}
                group |= {"eps": step.eps, "weight_decay": step.weight_decay}
            adapter.optimizer.step()
        adapter.optimizer.zero_grad()
        return {"grad_norm": norm, "skipped": float(is_skipped)}

    def factors_of(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """Return the factors, named as in PEFT files."""
        return {file_name(name): parameter.detach() for name, parameter in adapter.factors.items()}

    def write(self, adapter: Adapter, folder: Path, tokenizer: Any) -> None:
        """Write an adapter folder that PEFT loads."""
        self._describe(adapter.shape.rank, adapter.shape.alpha)
        factors = {name: parameter.detach() for name, parameter in adapter.factors.items()}
        save_adapter(self.hf_model, tokenizer, folder, state_dict=factors)

    def _describe(self, rank: int, alpha: float) -> object:
        """Return PEFT's configuration with this rank and scale."""
        config = self.hf_model.peft_config[ACTIVE]
        config.r, config.lora_alpha = rank, alpha
        return config

    def vllm_config(self, weights: AdapterWeights) -> dict[str, object]:
        """Return the configuration with which vLLM applies an adapter; {} for the base model."""
        if not weights.factors:
            return {}
        rank = next(len(factor) for name, factor in weights.factors.items() if ".lora_A." in name)
        return vllm_config(self._describe(rank, weights.alpha))

    def engine_weights(self, weights: AdapterWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full weights with the adapter merged, under checkpoint names."""
        self._activate_weights(weights)
        model = self.hf_model
        parameters = with_remainders(model, folded(in_folding_order(model), scales(model)))
        return as_in_checkpoint(model, itertools.chain(parameters, persistent_buffers(model)))

    def load(
        self, adapter: Adapter, factors: Mapping[str, torch.Tensor], optimizer: Mapping[str, object] | None
    ) -> None:
        """Replace the factors, named as in PEFT files, and the optimizer states; None resets them.

        Raises UsageError, with the adapter unchanged, if the factors do not match it.
        """
        own = {file_name(name): parameter for name, parameter in adapter.factors.items()}
        differing = own.keys() ^ factors.keys()
        differing |= {name for name in own.keys() & factors.keys() if own[name].shape != factors[name].shape}
        if differing:
            raise UsageError(f"the checkpoint does not match the model: check {min(differing)}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(factors[name])
        adapter.optimizer = torch.optim.AdamW(adapter.trained)
        if optimizer is not None:
            adapter.optimizer.load_state_dict(dict(optimizer))


@contextmanager
def _gradients_kept(adapter: Adapter) -> Iterator[None]:
    """Restore the gradient if the block fails: it would contain a part of the request."""
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in adapter.trained]
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(adapter.trained, before, strict=True):
            parameter.grad = gradient
        raise


def target_pack(data: Sequence[Datum]) -> Pack:
    """Pack sequences, with the targets that each position predicts. They need not be the next tokens."""
    sequences = [TokenSequence(datum.token_ids, np.zeros(len(datum.token_ids), bool)) for datum in data]
    packed = pack(sequences)
    rows, targets = [], []
    starts = itertools.accumulate((len(datum.token_ids) for datum in data), initial=0)
    for datum, start in zip(data, starts, strict=False):
        target = datum.inputs[TARGETS]
        per_token = target.size // len(target)
        rows.append(np.repeat(np.arange(start, start + len(target)), per_token))
        targets.append(target.reshape(-1))
    rows_K = torch.from_numpy(np.concatenate(rows))
    counts = np.cumsum([0, *(len(row) for row in rows)])
    return replace(
        packed,
        rows_K=rows_K,
        read_R=rows_K.unique(),
        targets_K=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        cu_trained=torch.from_numpy(counts.astype(np.int64)),
    )


def _columns(datum: Datum, device: torch.device) -> dict[str, torch.Tensor]:
    values = {name: value for name, value in datum.inputs.items() if name != TARGETS}
    return {name: torch.from_numpy(value.reshape(-1)).to(device) for name, value in values.items()}


def _is_attention(name: str) -> bool:
    """Return whether a layer belongs to attention, by its module path: `layers.0.self_attn.q_proj`."""
    return any("attn" in part or "attention" in part for part in name.split("."))
