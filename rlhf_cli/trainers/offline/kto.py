"""Learning from responses labelled desirable or undesirable: items, objective, and the baseline measured beforehand."""

import collections.abc
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals, sequence_mean
from rlhf_cli.algorithms.kto import UNPAIRED_LOSSES, UnpairedSettings, kl_baseline, kto_metrics
from rlhf_cli.data.packing.packs import Pack
from rlhf_cli.data.packing.prefix_packing import Branch, Tree, pack_trees
from rlhf_cli.data.preference_data import LabelledData, LabelledItem
from rlhf_cli.models.vision.pictures import Picture
from rlhf_cli.trainers.offline.dpo import Infer, InferringEngine
from rlhf_cli.trainers.offline.pairs import Gather, sequence_logprobs

REF, MISMATCHED_REF = "ref_logprobs", "mismatched_ref_logprobs"
TRIED_PARTNERS = 32
"""Items looked at for one with another prompt; data with a longer run of one prompt takes the last of them."""


@dataclass(frozen=True)
class LabelledBatch:
    """P responses packed, and in a pack of their own the same prompts with a response to another prompt.

    `columns` are float32 [P]: log-probabilities of both under the reference. `baseline` is z0 of the whole step
    in nats, None before it is known.
    """

    pack: Pack
    mismatched: Pack
    desirable_P: torch.Tensor
    columns: dict[str, torch.Tensor]
    baseline: float | None = None

    def to(self, device: torch.device | str) -> "LabelledBatch":
        """Return the same micro-batch on another device."""
        return replace(
            self,
            pack=self.pack.to(device),
            mismatched=self.mismatched.to(device),
            desirable_P=self.desirable_P.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )

    def with_columns(self, **columns: torch.Tensor) -> "LabelledBatch":
        """Return the same micro-batch with more columns."""
        return replace(self, columns=self.columns | columns)


@dataclass(frozen=True)
class LabelledItems:
    """Tokenised responses: one item is one response.

    Its mismatched response belongs to another item, always the same one, so that the reference's log-probabilities of
    both can be computed once. `columns` are float32 [N].
    """

    data: LabelledData
    partners: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item: of its own or of the mismatched response, whichever is longer."""
        responses = self.data.response_lengths
        return self.data.prompt_lengths + np.maximum(responses, responses[self.partners])

    @property
    def num_trained(self) -> np.ndarray:
        """Trained tokens of each response."""
        return self.data.num_trained

    @property
    def patches(self) -> np.ndarray | None:
        """Patches of the pictures of each response, None for models of text."""
        return self.data.patches

    def collate(self, indices: collections.abc.Sequence[int]) -> LabelledBatch:
        """Return the responses as one packed micro-batch."""
        items = [self.data.items[index] for index in indices]
        others = [self.data.items[self.partners[index]] for index in indices]
        pairs = zip(items, others, strict=True)
        chosen = np.array(indices, dtype=np.int64)
        return LabelledBatch(
            pack=pack_trees([_tree(item, item.response) for item in items], share_prompts=False),
            mismatched=pack_trees([_tree(item, other.response) for item, other in pairs], share_prompts=False),
            desirable_P=torch.tensor([item.desirable for item in items], dtype=torch.bool),
            columns={name: torch.from_numpy(column[chosen]) for name, column in self.columns.items()},
        )


def _tree(item: LabelledItem, response: Branch) -> Tree:
    """Return the prompt of an item with a response."""
    return Tree(item.prompt_ids, (response,), item.pictures)


def partners_of(data: LabelledData) -> np.ndarray:
    """Return for each item the number of another item whose response is put under its prompt, int64 [N]."""
    num_items = len(data.items)
    prompts = [hash(_contents(item)) for item in data.items]
    partners = np.zeros(num_items, dtype=np.int64)
    for number in range(num_items):
        tried = [(number + num_items // 2 + further) % num_items for further in range(min(TRIED_PARTNERS, num_items))]
        partners[number] = next((other for other in tried if prompts[other] != prompts[number]), tried[-1])
    return partners


def _contents(item: LabelledItem) -> tuple[bytes, tuple[Picture, ...]]:
    """Return the tokens and pictures of a prompt: the same question about another picture is another prompt."""
    return item.prompt_ids.tobytes(), tuple(placed.picture for placed in item.pictures)


def matched_logprobs(model: nn.Module, batch: LabelledBatch) -> torch.Tensor:
    """Return the log-probabilities [P] of the responses."""
    return sequence_logprobs(model, batch.pack)


def mismatched_logprobs(model: nn.Module, batch: LabelledBatch) -> torch.Tensor:
    """Return the log-probabilities [P] of the mismatched responses."""
    return sequence_logprobs(model, batch.mismatched)


@dataclass(frozen=True)
class KTOObjective:
    """One of the losses on single responses."""

    name: str
    settings: UnpairedSettings

    def __call__(self, model: nn.Module, batch: LabelledBatch, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Return this micro-batch's part of the mean loss over the responses of the step."""
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
        baseline = loss.new_tensor(batch.baseline) * len(loss_P) / totals.num_sequences
        return loss, {"loss": loss.detach(), "kl_baseline": baseline, **metrics}

    @property
    def needs_baseline(self) -> bool:
        """Whether z0 has to be measured."""
        return UNPAIRED_LOSSES[self.name].needs_baseline


@dataclass(frozen=True)
class KTOPreparation:
    """Adds to micro-batches the reference's log-probs and the baseline z0 of the whole step.

    `reference` is None if the items bring the log-probs of both responses.
    """

    objective: KTOObjective
    reference: "LabelledReference | None"
    gather: Gather

    def __call__(self, engine: InferringEngine, batches: list[LabelledBatch]) -> list[LabelledBatch]:
        """Return the micro-batches of this rank with columns and baseline."""
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
        references = [batch.columns[MISMATCHED_REF].cpu() for batch in batches]
        ratios_P = torch.cat([own - ref for own, ref in zip(found, references, strict=True)])
        whole_P1, _ = self.gather(ratios_P[:, None])
        return float(kl_baseline(whole_P1.double().mean()))


@dataclass(frozen=True)
class LabelledReference:
    """The reference's log-probabilities of responses and of mismatched responses."""

    matched: Infer
    mismatched: Infer


def _with_reference(batches: list[LabelledBatch], name: str, found: list[torch.Tensor]) -> list[LabelledBatch]:
    return [batch.with_columns(**{name: values}) for batch, values in zip(batches, found, strict=True)]
