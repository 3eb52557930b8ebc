"""Training on responses labeled desirable or undesirable: items, objective and KL baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean
from rlhf_cli.algorithms.kto import UNPAIRED_LOSSES, UnpairedSettings, kl_baseline, kto_metrics
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import Pack
from rlhf_cli.data.packing.prefix_packing import Continuation, Tree, pack_trees
from rlhf_cli.data.preference_data import LabelledItem
from rlhf_cli.models.vision.pictures import Picture
from rlhf_cli.trainers.offline.dpo import Infer, InferringEngine
from rlhf_cli.trainers.offline.loop import LoadedItems
from rlhf_cli.trainers.offline.pairs import Gather, sequence_logprobs

REF, MISMATCHED_REF = "ref_logprobs", "mismatched_ref_logprobs"
# Datasets repeat prompts a few times at most, so a few candidates suffice; trying all would be quadratic.
TRIED_PARTNERS = 32
"""Maximum number of items tried to find a different prompt; after that, the last one is used."""


@dataclass(frozen=True)
class LabelledBatch:
    """P packed responses, and a second pack with the same prompts and mismatched responses.

    `columns` are float32 [P]: reference log-probs of both responses. `baseline` is z0 for the step in nats, None until
    it is measured.
    """

    pack: Pack
    mismatched: Pack
    desirable_P: torch.Tensor
    columns: dict[str, torch.Tensor]
    baseline: float | None = None

    def to(self, device: torch.device | str) -> "LabelledBatch":
        """Move the micro-batch to a device."""
        return replace(
            self,
            pack=self.pack.to(device),
            mismatched=self.mismatched.to(device),
            desirable_P=self.desirable_P.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )

    def with_columns(self, **columns: torch.Tensor) -> "LabelledBatch":
        """Return the micro-batch with additional columns."""
        return replace(self, columns=self.columns | columns)


@dataclass(frozen=True)
class LabelledItems(LoadedItems[LabelledItem]):
    """Tokenized responses, one per item.

    Each item is always paired with the same mismatched response, so that reference log-probs of both are computed once.
    `columns` are float32 [N].
    """

    partners: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per item, with the longer of the matched and mismatched responses."""
        # A micro-batch must fit both packs, which run one after the other with the same prompts.
        responses = self.data.columns["response_length"]
        return self.data.columns["prompt_length"] + np.maximum(responses, responses[self.partners])

    def collate(self, indices: Sequence[int]) -> LabelledBatch:
        """Pack the responses into one micro-batch."""
        items = [self.data.items[index] for index in indices]
        others = [self.data.items[self.partners[index]] for index in indices]
        pairs = zip(items, others, strict=True)
        chosen = np.array(indices, dtype=np.int64)
        return LabelledBatch(
            # Prompts are not shared: the two packs have one response per prompt each.
            pack=pack_trees([_tree(item, item.response) for item in items], share_prompts=False),
            mismatched=pack_trees([_tree(item, other.response) for item, other in pairs], share_prompts=False),
            desirable_P=torch.tensor([item.desirable for item in items], dtype=torch.bool),
            columns={name: torch.from_numpy(column[chosen]) for name, column in self.columns.items()},
        )


def _tree(item: LabelledItem, response: Continuation) -> Tree:
    """Return an item's prompt with a response."""
    return Tree(item.prompt_ids, (response,), item.pictures)


def partners_of(data: LoadedData[LabelledItem]) -> np.ndarray:
    """Return for each item the index of the item with its mismatched response, int64 [N]."""
    num_items = len(data.items)
    # Compare hashes, because prompts are compared many times. A collision only causes a less suitable partner.
    prompts = [hash(_contents(item)) for item in data.items]
    partners = np.zeros(num_items, dtype=np.int64)
    for number in range(num_items):
        # Start half the dataset away: neighboring rows often share a prompt.
        tried = [(number + num_items // 2 + further) % num_items for further in range(min(TRIED_PARTNERS, num_items))]
        partners[number] = next((other for other in tried if prompts[other] != prompts[number]), tried[-1])
    return partners


def _contents(item: LabelledItem) -> tuple[bytes, tuple[Picture, ...]]:
    """Return the tokens and images of a prompt. The same question about another image is a different prompt."""
    return item.prompt_ids.tobytes(), tuple(placed.picture for placed in item.pictures)


def matched_logprobs(model: nn.Module, batch: LabelledBatch) -> torch.Tensor:
    """Return response log-probs [P]."""
    return sequence_logprobs(model, batch.pack)


def mismatched_logprobs(model: nn.Module, batch: LabelledBatch) -> torch.Tensor:
    """Return mismatched response log-probs [P]."""
    return sequence_logprobs(model, batch.mismatched)


@dataclass(frozen=True)
class KTOObjective:
    """Loss on unpaired responses."""

    name: str
    settings: UnpairedSettings

    def __call__(self, model: nn.Module, batch: LabelledBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's contribution to the mean loss over the step's responses."""
        assert batch.baseline is not None, "the step's baseline was not measured"
        log_ratios_P = matched_logprobs(model, batch) - batch.columns[REF]
        loss_P = UNPAIRED_LOSSES[self.name].function(log_ratios_P, batch.desirable_P, batch.baseline, self.settings)
        loss = sequence_mean(loss_P, totals)
        metrics = kto_metrics(
            log_ratios_P,
            batch.desirable_P,
            batch.baseline,
            beta=self.settings.beta,
            num_responses=totals.num_sequences,
        )
        # The engine sums metrics over micro-batches, so each one contributes its share of the constant.
        baseline = loss.new_tensor(batch.baseline) * len(loss_P) / totals.num_sequences
        return loss, {"loss": loss.detach(), "kl_baseline": baseline, **metrics}

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss requires z0."""
        return UNPAIRED_LOSSES[self.name].needs_baseline


@dataclass(frozen=True)
class KTOPreparation:
    """Adds reference log-probs and the step's baseline z0 to micro-batches.

    `reference` is None if the items contain both log-probs.
    """

    objective: KTOObjective
    reference: "LabelledReference | None"
    gather: Gather

    def __call__(self, engine: InferringEngine, batches: list[LabelledBatch]) -> list[LabelledBatch]:
        """Return this rank's micro-batches with columns and baseline."""
        needs_baseline = self.objective.needs_baseline
        if self.reference is not None:
            batches = _with_reference(batches, REF, self.reference.matched(engine, batches))
            if needs_baseline:
                batches = _with_reference(batches, MISMATCHED_REF, self.reference.mismatched(engine, batches))
        baseline = self._baseline(engine, batches) if needs_baseline else 0.0
        return [replace(batch, baseline=baseline) for batch in batches]

    def _baseline(self, engine: InferringEngine, batches: list[LabelledBatch]) -> float:
        """Return z0 over all ranks."""
        found = engine.infer(batches, mismatched_logprobs)
        # `infer` returns CPU tensors, whereas collated columns may have been moved to the device.
        references = [batch.columns[MISMATCHED_REF].cpu() for batch in batches]
        ratios_P = torch.cat([own - ref for own, ref in zip(found, references, strict=True)])
        whole_P1, _ = self.gather(ratios_P[:, None])
        # Sum in float64, because the order of rows depends on the number of ranks.
        return float(kl_baseline(whole_P1.double().mean()))


@dataclass(frozen=True)
class LabelledReference:
    """Reference log-probs of matched and mismatched responses."""

    matched: Infer
    mismatched: Infer


def _with_reference(batches: list[LabelledBatch], name: str, found: list[torch.Tensor]) -> list[LabelledBatch]:
    return [batch.with_columns(**{name: values}) for batch, values in zip(batches, found, strict=True)]
