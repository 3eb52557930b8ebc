"""The router loss of one optimizer step, added to the objective of any trained model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics
from rlhf_cli.algorithms.load_balance import balance_part
from rlhf_cli.backends.training import distributed
from rlhf_cli.models.routers import RouterRecorder

Loss = Callable[[nn.Module, object], tuple[torch.Tensor, Metrics]]


class RouterLoss:
    """Adds `coefficient` times the load-balancing loss over all micro-batches and ranks of a step."""

    def __init__(self, recorder: RouterRecorder, coefficient: float) -> None:
        self._recorder = recorder
        self._coefficient = coefficient

    @torch.no_grad()
    def added_to(self, compute_loss: Loss, *, model: nn.Module, micro_batches: Sequence[Any]) -> Loss:
        """Return the loss with this micro-batch's part of the router loss, which is also the metric `aux_loss`.

        The loss is not linear in the micro-batches. A forward pass over all of them comes first and counts how often
        each expert is taken, so that the result does not depend on how the step is cut. Every rank calls this.
        """
        counts = []
        for micro_batch in micro_batches:
            with self._recorder.recorded() as found:
                compute_loss(model, micro_batch.to(distributed.device()))
            counts += [torch.cat([sums.counts_E, sums.num_rows[None]]) for sums in found]
        whole = distributed.summed(torch.stack(counts).sum(0, dtype=torch.float64)).float()
        counts_E, num_rows = whole[:-1], whole[-1]

        def with_router_loss(model: nn.Module, micro_batch: object) -> tuple[torch.Tensor, Metrics]:
            with self._recorder.recorded() as found:
                loss, metrics = compute_loss(model, micro_batch)
            part = torch.stack([balance_part(sums, counts_E, num_rows) for sums in found]).sum()
            return loss + self._coefficient * part, metrics | {"aux_loss": part.detach()}

        return with_router_loss
