"""Process reward models: items and objective, with a score at the last token of each step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.algorithms.process_reward import step_loss, step_metrics
from rlhf_cli.data.packing.packs import MicroBatch, Pack, TokenSequence, at_targets, micro_batch, pack
from rlhf_cli.data.step_data import StepItem
from rlhf_cli.trainers.offline.loop import LoadedItems

LABELS = "labels"


class StepItems(LoadedItems[StepItem]):
    """Tokenized solutions with prompts, one per item. `num_trained` counts labeled steps."""

    def collate(self, indices: Sequence[int]) -> MicroBatch:
        """Pack the solutions into one micro-batch, read at the ends of labeled steps."""
        sequences = [sequence_of(self.data.items[index]) for index in indices]
        return micro_batch(sequences, names=(LABELS,), pack_sequences=pack_at_ends)


def sequence_of(item: StepItem) -> TokenSequence:
    """Return a solution with the last tokens of labeled steps as targets."""
    is_labelled = ~np.isnan(item.labels)
    mask = np.zeros(item.token_ids.size, dtype=bool)
    # `ends` are exclusive, so the step's last token is one before.
    mask[item.ends[is_labelled] - 1] = True
    return TokenSequence(item.token_ids, mask, item.pictures, {LABELS: item.labels[is_labelled]})


def pack_at_ends(sequences: list[TokenSequence]) -> Pack:
    """Pack the sequences to read states at their targets instead of before them."""
    return at_targets(pack(sequences))


def step_objective(model: nn.Module, batch: MicroBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
    """Return this micro-batch's contribution to the mean cross-entropy over the step's labeled solution steps."""
    logits_K, labels_K = model(batch.pack), batch.columns[LABELS]
    loss = token_mean(step_loss(logits_K, labels_K), totals)
    return loss, {"loss": loss.detach(), **step_metrics(logits_K, labels_K, batch.pack.cu_trained, totals)}
