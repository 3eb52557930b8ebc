"""Record mixture-of-experts router statistics during forward passes on packs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig

from rlhf_cli.algorithms.load_balance import RouterSums, router_sums
from rlhf_cli.errors import UsageError
from rlhf_cli.models.packs import PackLike

_COEFFICIENT = "router_aux_loss_coef"
"""Config key of models whose routers are trained with a load-balancing loss."""


class RouterRecorder:
    """Collects router sums from forward passes within `recorded`."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.is_on = False
        self._sums: list[RouterSums] = []

    @contextmanager
    def recorded(self) -> Iterator[list[RouterSums]]:
        """Yield a list that receives the router sums of each forward pass in the block."""
        self.is_on, self._sums = True, []
        try:
            yield self._sums
        finally:
            # A new list: the caller keeps the yielded one.
            self.is_on, self._sums = False, []

    def add(self, router_logits: tuple[torch.Tensor, ...], weights_T: torch.Tensor) -> None:
        """Add the router logits `[T, E]` of all layers; each token counts with its weight."""
        self._sums.append(router_sums(router_logits, weights_T, top_k=self._top_k))


def router_recorder(config: PretrainedConfig) -> RouterRecorder | None:
    """Return a recorder for this model, or None if its routers have no load-balancing loss."""
    text = config.get_text_config()
    return RouterRecorder(text.num_experts_per_tok) if _has_router_loss(text) else None


def check_router_loss(coefficient: float, architecture: PretrainedConfig) -> None:
    """Raise UsageError for a router loss on a model without one, before loading weights."""
    if coefficient and not _has_router_loss(architecture.get_text_config()):
        raise UsageError(
            f"--aux_loss_coef {coefficient:g}: models of type {architecture.model_type} have no router with a "
            "load-balancing loss; leave it at 0"
        )


def _has_router_loss(text: PretrainedConfig) -> bool:
    return hasattr(text, _COEFFICIENT) and bool(getattr(text, "num_experts_per_tok", None))


def token_weights(pack: PackLike, *, num_tokens: int) -> torch.Tensor:
    """Count the sequences in the pack that contain each token, float32 `[num_tokens]`.

    A shared prefix counts once for each sequence that continues it, so prefix sharing does not change the loss. Dummy
    tokens in idle packs and filler tokens have weight 0.
    """
    weights_T = torch.zeros(num_tokens, device=pack.input_ids_T.device)
    if pack.num_sequences == 0:
        return weights_T
    size = pack.input_ids_T.numel()
    if pack.keys is None:
        weights_T[:size] = 1.0
        return weights_T
    # Prefix tokens are keys of their own run and of each run that continues it; other tokens are keys once.
    weights_T[:size] = (pack.keys.index_U.bincount(minlength=size) - 1).clamp(min=1).float()
    return weights_T
