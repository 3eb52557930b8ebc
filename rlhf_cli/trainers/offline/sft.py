"""Supervised fine-tuning: its items and its objective."""

import collections.abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.data.packing.packs import Pack, pack
from rlhf_cli.data.sft_data import SequenceData


@dataclass(frozen=True)
class SequenceItems:
    """Tokenised sequences as the offline loop takes them: one item is one sequence."""

    data: SequenceData

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        return self.data.lengths

    @property
    def num_trained(self) -> np.ndarray:
        """Trained tokens of each sequence."""
        return self.data.num_trained

    @property
    def patches(self) -> np.ndarray | None:
        """Patches of the pictures of each sequence, None for models of text."""
        return self.data.patches

    def collate(self, indices: collections.abc.Sequence[int]) -> Pack:
        """Return the sequences as one packed micro-batch."""
        return pack([self.data.sequences[index] for index in indices])


def sft_objective(model: nn.Module, pack: Pack, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
    """Return this micro-batch's part of the mean negative log-likelihood of the step's trained tokens, in nats."""
    logprobs_K, _ = model(pack)
    loss = token_mean(-logprobs_K, totals)
    return loss, {"loss": loss.detach()}
