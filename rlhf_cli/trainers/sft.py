"""The objective of supervised fine-tuning."""

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.data.packing import Pack


def sft_objective(model: nn.Module, pack: Pack, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
    """This micro-batch's part of the mean negative log-likelihood of the step's trained tokens, in nats."""
    logprobs_K, _ = model(pack)
    loss = token_mean(-logprobs_K, totals)
    return loss, {"loss": loss.detach()}
