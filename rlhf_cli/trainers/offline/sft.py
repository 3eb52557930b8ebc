"""Supervised fine-tuning: items and objective."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, token_mean
from rlhf_cli.config.sft import SFTLoss
from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.models.embedding_noise import EmbeddingNoise
from rlhf_cli.trainers.offline.loop import LoadedItems


class SequenceItems(LoadedItems[TokenSequence]):
    """Tokenized sequences, one per item."""

    def collate(self, indices: Sequence[int]) -> Pack:
        """Pack the sequences into one micro-batch."""
        return pack([self.data.items[index] for index in indices])


@dataclass(frozen=True)
class SFTObjective:
    """Mean over the step's trained tokens of `-w log p`, or for `dft` (arXiv 2508.05629) `-w stopgrad(p) log p`.

    `w` is the token's loss weight; the denominator counts tokens, not weights. `noise_alpha` above 0 adds NEFTune's
    noise to the embeddings in training, drawn from `seed` (arXiv 2310.05914).
    """

    loss: SFTLoss = "nll"
    noise_alpha: float = 0.0
    seed: int = 0

    def __call__(self, model: nn.Module, pack: Pack, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the loss, in nats."""
        logprobs_K, _ = model(pack, **self._noise(totals))
        loss = token_mean(self.token_losses(logprobs_K, pack), totals)
        metrics = {"loss": loss.detach()}
        # Comparable between losses and weights.
        if self.loss != "nll" or pack.weights_K is not None:
            metrics["nll"] = token_mean(-logprobs_K.detach(), totals)
        return loss, metrics

    def token_losses(self, logprobs_K: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Return the loss of each trained token, [K]."""
        loss_K = -logprobs_K
        if self.loss == "dft":
            loss_K = logprobs_K.detach().exp() * loss_K
        return loss_K if pack.weights_K is None else pack.weights_K * loss_K

    def _noise(self, totals: StepTotals) -> dict[str, EmbeddingNoise]:
        if not self.noise_alpha or totals.step is None:
            return {}
        return {"noise": EmbeddingNoise(self.noise_alpha, self.seed, totals.step)}


sft_objective = SFTObjective()
"""The mean negative log-likelihood over the step's trained tokens, in nats."""
