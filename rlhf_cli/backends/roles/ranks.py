"""One rank of each online role: actor, critic, reference, teacher and reward model.

`start` starts ranks, and `groups` calls them. Micro-batches arrive as lists of sequences and are packed here, so that
only token IDs and numbers are sent between processes.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.algorithms.objective import LossWeights, next_weights, policy_objective, value_objective
from rlhf_cli.algorithms.token_trace import PLACE, policy_columns
from rlhf_cli.backends.roles.loss_inputs import LossInputs, optional_columns, with_places
from rlhf_cli.backends.roles.saved_models import describe_model, save_weights, save_whole_model
from rlhf_cli.backends.roles.selected_tokens import selecting
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.roles.settings import EngineLink, RoleSettings
from rlhf_cli.backends.roles.update_record import Terms, UpdateRecord
from rlhf_cli.backends.roles.watch import Watch
from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import (
    ComputeLoss,
    DeepSpeedEngine,
    buckets,
)
from rlhf_cli.backends.training.frozen_model import FrozenModel
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.backends.training.random_states import seed_everything
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.backends.training.weight_average import WeightAverage
from rlhf_cli.backends.weight_sync.adapter_push import ObjectTransport, vllm_config
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import Idle, PushReport, Transport, WeightSender
from rlhf_cli.backends.weight_sync.vllm_trainer import EngineClient, connect, tensor_specs
from rlhf_cli.data.packing.packs import MicroBatch, Pack, TokenSequence, at_targets, micro_batch, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.data.packing.splitting import split_members
from rlhf_cli.models.adapters import (
    ACTIVE,
    adapter_off,
    file_name,
    load_with_adapter,
    scales,
)
from rlhf_cli.models.checkpoint_names import as_in_checkpoint, persistent_buffers
from rlhf_cli.models.compat import attention_name
from rlhf_cli.models.host_memory import keep_freed_memory
from rlhf_cli.models.loading import load_causal_lm, load_reward_model, load_value_backbone
from rlhf_cli.models.merging import folded, in_folding_order
from rlhf_cli.models.mixers.layers import layers_in
from rlhf_cli.models.mixers.remainders import with_remainders
from rlhf_cli.models.policy import PolicyModel, ValueModel
from rlhf_cli.models.quantised import dense
from rlhf_cli.models.saving import end_at
from rlhf_cli.models.sequence_parallel.checks import can_share_prompts
from rlhf_cli.models.sequence_parallel.shards import SequenceRanks
from rlhf_cli.models.tokenizers import load_tokenizer


def _transport(link: EngineLink, hf_model: Any) -> Transport:
    # Rank 0 sends. The other ranks are idle but take part, because gathering weights is a collective.
    if link.adapter_alone:
        return ObjectTransport(vllm_config(hf_model.peft_config[ACTIVE])) if dist.get_rank() == 0 else Idle()
    if link.backend == "shm":
        return ShmTransport() if dist.get_rank() == 0 else Idle()
    client = EngineClient(link.call_engines, num_engines=link.num_engines, ranks_per_engine=link.ranks_per_engine)
    specs = tensor_specs(hf_model)
    return connect(link.backend, specs, client=client, rank=dist.get_rank(), rendezvous=link.rendezvous)


class _Packer:
    """Packs the sequences of a micro-batch. Prompts shared by neighbors are packed once, if the model supports it."""

    def __init__(self, settings: RoleSettings, hf_model: Any) -> None:
        attention, layers = attention_name(hf_model.config), layers_in(hf_model)
        self._shares_prompts = settings.share_prompts and can_share_prompts(attention, settings.deepspeed, layers)

    def shares_prompts(self) -> bool:
        """Return whether shared prompts are packed once."""
        return self._shares_prompts

    def __call__(self, sequences: list[TokenSequence]) -> Pack:
        return pack_groups(sequences) if self._shares_prompts else pack(sequences)

    def steps(
        self, work: RankWork, names: tuple[str, ...]
    ) -> Iterator[tuple[Callable[[int | None], list[MicroBatch]], StepTotals]]:
        """Yield, per optimizer step, a function of the token limit that packs this rank's micro-batches with these
        columns, and the totals over all ranks.
        """
        for step, totals in zip(work.steps, work.totals, strict=True):
            yield partial(self._packed, step, names), totals

    def _packed(
        self, step: list[list[TokenSequence]], names: tuple[str, ...], max_tokens: int | None
    ) -> list[MicroBatch]:
        batches = (micro_batch(part, names=names, pack_sequences=self) for part in within(step, max_tokens))
        return [with_places(batch) for batch in batches]


def within(step: list[list[TokenSequence]], max_tokens: int | None) -> Iterator[list[TokenSequence]]:
    """Yield the micro-batches of a step, split to at most `max_tokens`; None keeps them."""
    for sequences in step:
        yield from split_members(sequences, [len(sequence) for sequence in sequences], max_tokens=max_tokens)


class TrainedRank:
    """One rank of a trained role: shared methods of actor, critic and student."""

    def __init__(
        self, settings: RoleSettings, hf_model: nn.Module, module: nn.Module, *, ema_beta: float | None = None
    ) -> None:
        self.settings = settings
        self.hf_model = hf_model
        end_at(hf_model, settings.end_ids)
        self.packer = _Packer(settings, hf_model)
        self.engine = DeepSpeedEngine(
            module,
            settings.deepspeed,
            optim=settings.optim,
            learning_rate=settings.learning_rate,
            total_steps=settings.total_steps,
            param_dtype=settings.model.param_dtype,
            sleeps=settings.sleeps,
        )
        trained = [(name, parameter) for name, parameter in hf_model.named_parameters() if parameter.requires_grad]
        self._average = None if ema_beta is None else WeightAverage(trained, beta=ema_beta)

    def train_step(
        self,
        packed: Callable[[int | None], list[Any]],
        loss: ComputeLoss,
        *,
        accumulated: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Run an optimizer step on micro-batches that `packed` returns for a token limit. Returns the metrics.

        `accumulated` is called before the optimizer step.
        """
        return self.engine.train_step(packed(self.engine.token_limit), loss, smaller=packed, accumulated=accumulated)

    def update_average(self) -> None:
        """Update the moving average of the weights, if enabled. Call it after each optimizer step."""
        if self._average is not None:
            self._average.update()

    def sleep(self) -> None:
        """Move all states to host memory."""
        self.engine.sleep()

    def sleep_optimizer(self) -> None:
        """Move all states except the weights to host memory."""
        self.engine.sleep_optimizer()

    def wake(self) -> None:
        """Move all states to the GPU."""
        self.engine.wake()

    def checkpoint_bytes(self) -> int:
        """Estimate the number of bytes that `save` writes on all ranks."""
        return self.engine.checkpoint_bytes() + (self._average.num_bytes() if self._average else 0)

    def save(self, directory: Path) -> None:
        """Save weights, optimizer, schedule, RNG states and average."""
        self.engine.save(directory)
        if self._average is not None:
            self._average.save(directory)
        describe_model(self.hf_model, self._tokenizer, directory)

    def load(self, directory: Path) -> None:
        """Load a state written by `save`."""
        self.engine.load(directory)
        if self._average is not None:
            self._average.load(directory)

    def save_model(self, directory: Path) -> None:
        """Save the model in Hugging Face format."""
        save_whole_model(self.engine, self.hf_model, self._tokenizer, directory)

    def save_average(self, directory: Path) -> None:
        """Save the moving average of the weights as a model in Hugging Face format."""
        assert self._average is not None, "no average is kept"
        save_weights(self._average.weights(), self.hf_model, self._tokenizer, directory)

    @cached_property
    def _tokenizer(self) -> object:
        return load_tokenizer(self.settings.model)


class SampledRank(TrainedRank):
    """One rank of a trained model whose weights are pushed to the engines: policy or student.

    `record`: of the last update with a `watch`, None without.
    """

    record: UpdateRecord | None = None

    def __init__(self, settings: RoleSettings, wrap: Callable[[Any, SequenceRanks | None], nn.Module]) -> None:
        hf_model = join_and_load(settings, load_causal_lm)
        module = wrap(hf_model, sequence_ranks(settings.deepspeed, hf_model.config))
        super().__init__(settings, hf_model, module, ema_beta=settings.ema_beta)
        self._sender: WeightSender | None = None
        self._pushes_adapter = False

    def connect_engines(self, link: EngineLink) -> None:
        """Connect to the engines for weight pushes. Call it on all ranks."""
        # Called again after an engine restart: close the connection to the dead process.
        if self._sender is not None:
            self._sender.close()
        self._sender = WeightSender(_transport(link, self.hf_model))
        self._pushes_adapter = link.adapter_alone

    def push_weights(self, version: int) -> PushReport:
        """Push the weights to the engines. Call it on all ranks. The report is valid on rank 0."""
        assert self._sender is not None, "no engine is connected"
        weights = self._adapter_weights() if self._pushes_adapter else self.engine_weights()
        return self._sender.send(weights, version)

    def discard_push(self) -> None:
        """Remove the files of the last push after all engines have loaded it (shm only)."""
        assert self._sender is not None, "no engine is connected"
        self._sender.close()

    def engine_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights under checkpoint names, with the adapter merged. Every rank must iterate to the end."""
        hf_model = self.hf_model
        ordered = in_folding_order(hf_model)
        parameters = folded(dense(self.engine.whole(ordered), dict(ordered)), scales(hf_model))
        parameters = with_remainders(hf_model, parameters)
        return as_in_checkpoint(hf_model, itertools.chain(parameters, persistent_buffers(hf_model)))

    def num_buckets(self) -> int:
        """Return the number of buckets with weights."""
        return len(list(buckets(list(self.hf_model.named_parameters()))))

    def bucket(self, number: int) -> dict[str, torch.Tensor]:
        """Return the full weights of a bucket on the CPU, on rank 0. Call it on all ranks."""
        chosen = list(buckets(list(self.hf_model.named_parameters())))[number]
        gathered = self.engine.whole(chosen)
        # Copied, because a gathered tensor is valid only until the next one.
        return {name: weight.to("cpu", copy=True) for name, weight in gathered if dist.get_rank() == 0}

    def _began(self, step: list[list[TokenSequence]], terms: Terms) -> Callable[[], None]:
        """Begin an optimizer step. Returns the function to call before its end."""
        return (lambda: None) if self.record is None else self.record.begin_step(self.engine.module, step, terms)

    def _adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter's full weights under PEFT's names. Every rank must iterate to the end."""
        trained = self.engine.named_weights(self.hf_model, only_trained=True)
        return ((file_name(name), weight) for name, weight in trained)


class ActorRank(SampledRank):
    """One rank of the trained policy."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings, partial(PolicyModel, replays_routing=settings.policy.rollout_routing_replay))

    def logprobs(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        """Return the log-probs of trained tokens, float32 [K] per micro-batch, in nats."""
        return _infer(self, micro_batches, _logprobs_at(self.settings.temperature))

    def update(
        self, work: RankWork, on_policy: bool, weights: LossWeights, *, watch: Watch | None = None
    ) -> list[dict[str, float]]:
        """Run the optimizer steps. Returns metrics per step. `on_policy`: ratios use current log-probs."""
        self.record = None if watch is None else UpdateRecord(watch)
        anchor = () if on_policy else ("old_logprobs",)
        place = () if self.record is None else PLACE
        names = ("rollout_logprobs", "advantages", *anchor, *(f"{role}_logprobs" for role in weights.kl), *place)
        names += optional_columns(self.settings.policy)
        _check_all_read(work, {*names, "old_logprobs", *CriticRank.COLUMNS})
        metrics = []
        for step, (packed, totals) in zip(work.steps, self.packer.steps(work, names), strict=True):
            selected = selecting(self.engine, packed, self.settings)
            found = self.train_step(selected, self._loss(totals, weights), accumulated=self._began(step, self._terms))
            self.update_average()
            weights = next_weights(weights, found, settings=self.settings.policy)
            metrics.append(found)
        return metrics

    def base_logprobs(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        """Return the same as `logprobs`, for the base model without the adapter."""
        with adapter_off(self.engine.module):
            return self.logprobs(micro_batches)

    def _terms(self, sequence: TokenSequence, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the parts of the step's loss by sampled token, `[K]`: their gradients sum to that of its terms."""
        names = optional_columns(self.settings.policy)
        batch = with_places(micro_batch([sequence], names=names, pack_sequences=self.packer))
        batch = batch.to(distributed.device())
        found = LossInputs.of(self.engine.module, batch, temperature=self.settings.temperature)
        parts = (columns[name].to(found.logprobs_K) for name in ("gradient", "entropy_gradient"))
        outputs = (found.logprobs_K, found.entropy_K)
        return sum(part_K * values_K for part_K, values_K in zip(parts, outputs, strict=True))

    def _loss(self, totals: StepTotals, weights: LossWeights) -> ComputeLoss:
        settings = self.settings

        def loss(model: nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
            found = LossInputs.of(model, batch, temperature=settings.temperature)
            inputs = (found.logprobs_K, found.entropy_K, found.policy_columns(weights.kl))
            step: dict[str, Any] = {"totals": totals, "weights": weights, "max_new_tokens": settings.max_new_tokens}
            step["settings"] = settings.policy
            if self.record is not None:
                place = {name: found.columns[name] for name in PLACE}
                self.record.trace.add(place | policy_columns(*inputs, **step))
            return policy_objective(*inputs, **step, observed_O=found.observed_O)

        return loss


class CriticRank(TrainedRank):
    """One rank of the trained value model."""

    COLUMNS = ("old_values", "returns")

    def __init__(self, settings: RoleSettings) -> None:
        hf_model = join_and_load(settings, load_value_backbone)
        super().__init__(settings, hf_model, ValueModel(hf_model, sequence_ranks(settings.deepspeed, hf_model.config)))

    def values(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        """Return the values of the states before trained tokens, float32 [K] per micro-batch."""
        return _infer(self, micro_batches, lambda model, batch: model(batch))

    def update(self, work: RankWork) -> list[dict[str, float]]:
        """Run the optimizer steps. Returns metrics per step."""
        return [self.train_step(packed, self._loss(totals)) for packed, totals in self.packer.steps(work, self.COLUMNS)]

    def _loss(self, totals: StepTotals) -> ComputeLoss:
        settings = self.settings

        def loss(model: nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
            return value_objective(
                model(batch.pack),
                old_values_K=batch.columns["old_values"],
                returns_K=batch.columns["returns"],
                cu=batch.pack.cu_trained,
                value_clip=settings.critic.value_clip,
                # Prompts matter to the actor, which compares their responses.
                loss_agg="token_mean" if settings.policy.loss_agg == "prompt_mean" else settings.policy.loss_agg,
                totals=totals,
                max_new_tokens=settings.max_new_tokens,
            )

        return loss


class _FrozenRank(FrozenModel):
    """One rank of a frozen model."""

    def __init__(
        self,
        settings: RoleSettings,
        load: Callable[..., nn.Module],
        wrap: Callable[[Any, SequenceRanks | None], nn.Module],
    ) -> None:
        self.settings = settings
        hf_model = join_and_load(settings, load)
        super().__init__(hf_model, wrap, settings.deepspeed, param_dtype=settings.model.param_dtype)
        keep_freed_memory()
        self.packer = _Packer(settings, self.hf_model)


class FrozenPolicyRank(_FrozenRank):
    """One rank of a frozen policy: the reference of the KL divergence, or teachers."""

    def __init__(self, settings: RoleSettings) -> None:
        super().__init__(settings, load_causal_lm, PolicyModel)
        alone = replace(settings, other_models=())
        self._others = [FrozenPolicyRank(replace(alone, model=model)) for model in settings.other_models]

    def logprobs(self, micro_batches: list[list[TokenSequence]], number: int = 0) -> list[np.ndarray]:
        """Return the log-probs of trained tokens from the model with this number, float32 [K] per micro-batch, in
        nats.
        """
        return _infer([self, *self._others][number], micro_batches, _logprobs_at(self.settings.temperature))

    def sleep(self) -> None:
        """Move the weights of all models to host memory."""
        super().sleep()
        for model in self._others:
            model.sleep()

    def wake(self) -> None:
        """Move the weights of all models back to the GPU, unless they are offloaded."""
        super().wake()
        for model in self._others:
            model.wake()


class RewardRank(_FrozenRank):
    """One rank of the reward model."""

    def __init__(self, settings: RoleSettings) -> None:
        # Scores are read at tokens of whole sequences, which packs with a common prompt do not have.
        super().__init__(replace(settings, share_prompts=False), load_reward_model, ValueModel)

    def scores(self, micro_batches: list[list[TokenSequence]]) -> list[np.ndarray]:
        """Return the scores at the marked tokens, float32 [K] per micro-batch."""

        # A value is read before a target, a score at it.
        def forward(model: nn.Module, batch: Pack) -> torch.Tensor:
            values_K: torch.Tensor = model(at_targets(batch))
            return values_K

        return _infer(self, micro_batches, forward)


def join_and_load(settings: RoleSettings, load: Callable[..., nn.Module]) -> nn.Module:
    """Join the role's process group, and load the model directly to this rank's device."""
    distributed.join_process_group()
    seed_everything(settings.seed)
    partition = partitioned_loading(settings.deepspeed, param_dtype=settings.model.param_dtype)
    return load_with_adapter(load, settings.model, settings.adapter, device=distributed.device(), partition=partition)


def _check_all_read(work: RankWork, names: set[str]) -> None:
    """Assert that every column of the sequences is read by the loss of actor or critic."""
    members = itertools.chain.from_iterable(itertools.chain.from_iterable(work.steps))
    unread = {name for sequence in members for name in sequence.columns} - names
    assert not unread, f"no loss reads the columns {sorted(unread)}: pack them in ActorRank.update or drop them"


def _infer(
    rank: TrainedRank | _FrozenRank,
    micro_batches: list[list[TokenSequence]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
) -> list[np.ndarray]:
    packs = [rank.packer(sequences) for sequences in micro_batches]
    return [result.float().numpy() for result in rank.engine.infer(packs, forward)]


def _logprobs_at(temperature: float) -> Callable[[nn.Module, Any], torch.Tensor]:
    return lambda model, batch: model(batch, temperature=temperature)[0]
