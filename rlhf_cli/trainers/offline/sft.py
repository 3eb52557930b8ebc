"""Supervised fine-tuning: items and objective."""

from collections.abc import Sequence

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.trainers.offline.loop import LoadedItems


class SequenceItems(LoadedItems[TokenSequence]):
    """Tokenized sequences, one per item."""

    def collate(self, indices: Sequence[int]) -> Pack:
        """Pack the sequences into one micro-batch."""
        return pack([self.data.items[index] for index in indices])


def sft_objective(model: nn.Module, pack: Pack, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
    """Return this micro-batch's contribution to the mean negative log-likelihood over the step's trained tokens, in
    nats.
    """
    logprobs_K, _ = model(pack)
    loss = token_mean(-logprobs_K, totals)
    return loss, {"loss": loss.detach()}
