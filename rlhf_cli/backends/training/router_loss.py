"""Router load-balancing loss, added to the loss of any trained model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.load_balance import balance_part
from rlhf_cli.backends.training import distributed
from rlhf_cli.models.routers import RouterRecorder

_Loss = Callable[[nn.Module, object], tuple[torch.Tensor, Metrics]]


class RouterLoss:
    """Adds `coefficient` times the load-balancing loss, computed over the step's micro-batches and ranks."""

    def __init__(self, recorder: RouterRecorder, coefficient: float) -> None:
        self._recorder = recorder
        self._coefficient = coefficient

    @torch.no_grad()
    def added_to(self, compute_loss: _Loss, *, model: nn.Module, micro_batches: Sequence[Any]) -> _Loss:
        """Add a micro-batch's contribution to the router loss, with the metric `aux_loss`. Call it on all ranks."""
        counts = []
        # The router loss is not linear in the micro-batches. An extra forward pass over all of them first counts how
        # often each expert is selected, so that micro-batching does not change the result.
        for micro_batch in micro_batches:
            with self._recorder.recorded() as recorded:
                compute_loss(model, micro_batch.to(distributed.device()))
            counts += [torch.cat([sums.counts_E, sums.num_rows[None]]) for sums in recorded]
        # float64, because float32 counts are exact only up to 2^24.
        total = distributed.summed(torch.stack(counts).sum(0, dtype=torch.float64)).float()
        counts_E, num_rows = total[:-1], total[-1]

        def with_router_loss(model: nn.Module, micro_batch: object) -> tuple[torch.Tensor, Metrics]:
            with self._recorder.recorded() as recorded:
                loss, metrics = compute_loss(model, micro_batch)
            part = torch.stack([balance_part(sums, counts_E, num_rows) for sums in recorded]).sum()
            return loss + self._coefficient * part, metrics | {"aux_loss": part.detach()}

        return with_router_loss
