"""Supervised fine-tuning: items and objective."""

import collections.abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack


@dataclass(frozen=True)
class SequenceItems:
    """Tokenized sequences, one per item."""

    data: LoadedData[TokenSequence]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sequence."""
        return self.data.columns["length"]

    @property
    def num_trained(self) -> np.ndarray:
        """Trained tokens per sequence."""
        return self.data.columns["num_trained"]

    @property
    def patches(self) -> np.ndarray | None:
        """Image patches per sequence, None for text models."""
        return self.data.patches

    def collate(self, indices: collections.abc.Sequence[int]) -> Pack:
        """Pack the sequences into one micro-batch."""
        return pack([self.data.items[index] for index in indices])


def sft_objective(model: nn.Module, pack: Pack, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
    """Return this micro-batch's contribution to the mean negative log-likelihood over the step's trained tokens, in
    nats.
    """
    logprobs_K, _ = model(pack)
    loss = token_mean(-logprobs_K, totals)
    return loss, {"loss": loss.detach()}
