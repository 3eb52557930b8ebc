"""Record the experts that routers choose, and replay the choices of the rollout engine.

Rollout routing replay (R3, arXiv 2510.11370): engine and trainer round differently, so a router whose scores are close
sends a token to other experts in training than in sampling, and its log-prob jumps. Replay replaces only the choice.
Gate weights are computed from the trainer's own scores for the chosen experts, with gradients.

Routers choose with `torch.topk` over the scores of all experts. Within a decoder layer this call is intercepted, so
that everything else is the model's own code.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_cli.errors import UsageError

# fmt: off
REPLAYED_TYPES = frozenset({
    "afmoe", "axk1", "cohere2_moe", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax",
    "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "solar_open",
})
# fmt: on
"""Types whose routers choose with one `torch.topk` per layer, and can weight every expert.

Not in it: jetmoe, which also routes attention; deepseek_v2, whose groups that are not chosen have weight 0; aria_text
and longcat_flash, whose configurations do not name the numbers of experts in the common way.
tests/unit/models/test_routing_replay.py replays them; add new types in both places.
"""
ROUTED_EXPERTS = "routed_experts"
"""Argument under which decoders pass the experts to their layers."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = (torch.topk, torch.Tensor.topk)


def check_routing_replay(architecture: PretrainedConfig) -> None:
    """Raise UsageError if the routers of a model cannot be replayed, before loading weights."""
    text = architecture.get_text_config()
    kind = text.model_type
    if kind not in REPLAYED_TYPES:
        raise UsageError(
            f"--rollout_routing_replay: models of type {kind} have no routers that can be replayed; supported: "
            f"{', '.join(sorted(REPLAYED_TYPES))}"
        )
    # Some types are mixtures only in some sizes.
    if _num_experts(text) < 2:
        raise UsageError(f"--rollout_routing_replay: this {kind} model is not a mixture of experts: drop it")


def _num_experts(text: PretrainedConfig) -> int:
    return next((getattr(text, name) for name in _NUM_EXPERTS if getattr(text, name, None)), 0)


@dataclass(frozen=True)
class ReplayedExperts:
    """Experts of a pack's tokens, int16 [T, layers, top_k]; -1 where the router chooses.

    Layers without a router ignore theirs. The last layer's MLP may run only for the positions `read_R`.
    """

    experts_TLk: torch.Tensor
    read_R: torch.Tensor

    def chosen(self, layer: int, own_Tk: torch.Tensor) -> torch.Tensor:
        """Return the experts of a layer, int64 [T, top_k], or [R, top_k] if it routes only `read_R`."""
        experts_Tk = self.experts_TLk[:, layer].long()
        # Positions are unique and sorted, so with T of them both cases are the same.
        if len(own_Tk) != len(experts_Tk):
            experts_Tk = experts_Tk.index_select(0, self.read_R)
        return torch.where(experts_Tk >= 0, experts_Tk, own_Tk)


class ExpertChoice:
    """Wraps the layers of a decoder, to record the experts that they choose or to replay those that they receive.

    Layers recomputed in backward receive the same arguments, so they replay the same experts.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        text = decoder.config.get_text_config()
        self._num_experts = _num_experts(text)
        self._top_k: int = text.num_experts_per_tok
        self._num_layers = len(decoder.layers)
        # By layer, while a forward pass is recorded.
        self._recorded: dict[int, torch.Tensor] | None = None
        for number, layer in enumerate(decoder.layers):
            layer.forward = functools.wraps(layer.forward)(functools.partial(self._run, layer.forward, number))

    @contextmanager
    def recorded(self) -> Iterator[Callable[[], np.ndarray]]:
        """Record a forward pass in the block. The function returns the experts of its tokens, padding included.

        They are uint8 or uint16 [tokens, layers, top_k] as in vLLM, with zeros for layers without a router.
        """
        found: dict[int, torch.Tensor] = {}
        self._recorded = found
        try:
            yield lambda: self._stacked(found)
        finally:
            self._recorded = None

    def _stacked(self, found: dict[int, torch.Tensor]) -> np.ndarray:
        if not found:
            raise UsageError("--rollout_routing_replay: no layer of the model has a router")
        no_router = torch.zeros_like(next(iter(found.values())))
        experts_TLk = torch.stack([found.get(number, no_router) for number in range(self._num_layers)], dim=1)
        return experts_TLk.cpu().numpy().astype(np.uint8 if self._num_experts <= 256 else np.uint16)

    def _run(self, forward: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
        replayed: ReplayedExperts | None = kwargs.pop(ROUTED_EXPERTS, None)
        if replayed is not None:
            with self._choosing(functools.partial(replayed.chosen, layer)):
                return forward(*args, **kwargs)
        if (recorded := self._recorded) is not None:

            def record(own_Tk: torch.Tensor) -> torch.Tensor:
                return recorded.setdefault(layer, own_Tk)

            with self._choosing(record):
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    def _choosing(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "_Choosing":
        return _Choosing(choose, num_experts=self._num_experts, top_k=self._top_k)


class _Choosing(TorchFunctionMode):
    """Replaces the experts [T, top_k] that `torch.topk` finds in scores [T, experts] by `choose(experts)`."""

    def __init__(self, choose: Callable[[torch.Tensor], torch.Tensor], *, num_experts: int, top_k: int) -> None:
        super().__init__()
        self._choose = choose
        self._num_experts = num_experts
        self._top_k = top_k

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in _TOP_K or not self._is_over_experts(args[0], output.indices):
            return output
        experts_Tk = self._choose(output.indices)
        return torch.return_types.topk((args[0].gather(1, experts_Tk), experts_Tk))

    def _is_over_experts(self, scores: torch.Tensor, indices: torch.Tensor) -> bool:
        # Routers with groups of experts choose groups too, by scores of other shapes.
        return scores.ndim == 2 and scores.shape[1] == self._num_experts and indices.shape[1] == self._top_k
