"""Random preference data and solutions, and rm, prm, dpo and kto steps with DeepSpeed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial as partially
from typing import Any

import numpy as np
import torch
from tiny_training import Layout, load_policy, make_engine, partition, weights_of

from rlhf_cli.algorithms.kto import UnpairedSettings
from rlhf_cli.algorithms.preference import PreferenceSettings
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.distributed import gather_rows
from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.prefix_packing import Continuation
from rlhf_cli.data.preference_data import LabelledItem, Pair
from rlhf_cli.data.step_data import StepItem
from rlhf_cli.models.loading import load_value_backbone
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.trainers.offline import dpo, kto
from rlhf_cli.trainers.offline.loop import bind
from rlhf_cli.trainers.offline.pairs import Gather, PairItems
from rlhf_cli.trainers.offline.prm import StepItems, step_objective
from rlhf_cli.trainers.offline.rm import MARGIN, RewardObjective

STEPS = [[0, 1, 2, 3, 4], [5, 6], [7]]
NUM_ITEMS = 8


def make_continuation(rng: np.random.Generator, most: int = 7) -> Continuation:
    """Return one to seven tokens below 40; the last one is trained, others with probability 0.5."""
    length = int(rng.integers(1, most + 1))
    mask = rng.random(length) < 0.5
    mask[-1] = True
    return Continuation(rng.integers(0, 40, length).astype(np.int32), mask)


def make_pairs(count: int = NUM_ITEMS, *, seed: int = 0) -> LoadedData[Pair]:
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(
            rng.integers(0, 40, rng.integers(1, 9)).astype(np.int32),
            make_continuation(rng),
            make_continuation(rng),
            index / 4,
        )
        for index in range(count)
    ]

    def counts(of: Callable[[Pair], int]) -> np.ndarray:
        return np.array([of(pair) for pair in pairs], dtype=np.int32)

    return LoadedData(
        pairs,
        {
            "prompt_length": counts(lambda pair: pair.prompt_ids.size),
            "chosen_length": counts(lambda pair: len(pair.chosen)),
            "rejected_length": counts(lambda pair: len(pair.rejected)),
            "num_trained": counts(lambda pair: int(pair.chosen.loss_mask.sum() + pair.rejected.loss_mask.sum())),
        },
        report=None,  # type: ignore[arg-type]
        row_of=None,  # type: ignore[arg-type]
        fingerprint=str,
    )


def make_labelled(count: int = NUM_ITEMS, *, seed: int = 0) -> LoadedData[LabelledItem]:
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        continuation = make_continuation(rng)
        continuation.loss_mask[0] = True
        prompt = rng.integers(0, 40, rng.integers(1, 9)).astype(np.int32)
        items.append(LabelledItem(prompt, continuation, bool(rng.random() < 0.5)))

    def counts(of: Callable[[LabelledItem], int]) -> np.ndarray:
        return np.array([of(item) for item in items], dtype=np.int32)

    return LoadedData(
        items,
        {
            "prompt_length": counts(lambda item: item.prompt_ids.size),
            "response_length": counts(lambda item: len(item.response)),
            "num_trained": counts(lambda item: int(item.response.loss_mask.sum())),
            "desirable": counts(lambda item: item.desirable).astype(bool),
        },
        report=None,  # type: ignore[arg-type]
        row_of=None,  # type: ignore[arg-type]
        fingerprint=str,
    )


@dataclass(frozen=True)
class Task:
    """An objective with items, and preparation of micro-batches with a frozen reference."""

    objective: Any
    items: Any
    is_reward_model: bool = False
    prepare: Callable[[FrozenEngine, Gather], Any] | None = None


def dpo_task(*names: str, share: bool = True, **settings: Any) -> Task:
    names_of_objective = ("nll_loss_coef", "use_weighting", "ld_alpha")
    options = {name: settings.pop(name) for name in names_of_objective if name in settings}
    weights = tuple(1.0 + i for i in range(len(names)))
    objective = dpo.DPOObjective(names, weights, PreferenceSettings(**settings), **options)

    def prepare(frozen: FrozenEngine, gather: Gather) -> Any:
        def infer(engine: Any, batches: list[Any]) -> list[torch.Tensor]:
            return frozen.infer(batches, objective.forward)

        return dpo.PairPreparation(objective, infer if objective.needs_reference else None, gather)

    return Task(objective, PairItems(make_pairs(), share, read_ends=False, columns={}), prepare=prepare)


def rm_task(*, share: bool = True, margin: bool = False, center: float = 0.0) -> Task:
    pairs = make_pairs()
    columns = {MARGIN: np.array([pair.margin for pair in pairs.items], dtype=np.float32)}
    items = PairItems(pairs, share, read_ends=True, columns=columns)
    return Task(RewardObjective("sigmoid", margin, center), items, is_reward_model=True)


def kto_task(name: str = "kto", **settings: Any) -> Task:
    objective, data = kto.KTOObjective(name, UnpairedSettings(**settings)), make_labelled()

    def prepare(frozen: FrozenEngine, gather: Gather) -> Any:
        def asked(forward: Any) -> Any:
            return lambda engine, batches: frozen.infer(batches, forward)

        reference = kto.LabelledReference(asked(kto.matched_logprobs), asked(kto.mismatched_logprobs))
        return kto.KTOPreparation(objective, reference, gather)

    return Task(objective, kto.LabelledItems(data, kto.partners_of(data), {}), prepare=prepare)


def make_steps(count: int = NUM_ITEMS, *, seed: int = 0) -> LoadedData[StepItem]:
    """Return solutions with one to five steps of one to four tokens below 40; labels are 1, 0, a probability or
    missing.
    """
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        start, lengths = int(rng.integers(1, 9)), rng.integers(1, 5, rng.integers(1, 6))
        ends = (start + np.cumsum(lengths)).astype(np.int32)
        labels = rng.choice(np.array([1.0, 0.0, 0.3, np.nan], np.float32), ends.size, p=[0.4, 0.3, 0.2, 0.1])
        labels[0] = 1.0
        items.append(StepItem(rng.integers(0, 40, ends[-1]).astype(np.int32), ends, labels, start))

    def counts(of: Callable[[StepItem], int]) -> np.ndarray:
        return np.array([of(item) for item in items], dtype=np.int32)

    return LoadedData(
        items,
        {
            "length": counts(lambda item: item.token_ids.size),
            "num_trained": counts(lambda item: int(np.count_nonzero(~np.isnan(item.labels)))),
        },
        report=None,  # type: ignore[arg-type]
        row_of=None,  # type: ignore[arg-type]
        fingerprint=str,
    )


def prm_task() -> Task:
    return Task(step_objective, StepItems(make_steps()), is_reward_model=True)


TASKS: dict[str, Callable[[], Task]] = {
    "rm": lambda: rm_task(margin=True, center=0.1),
    "prm": prm_task,
    "dpo": lambda: dpo_task("sigmoid", nll_loss_coef=0.3),
    "dpo weighted": lambda: dpo_task("sigmoid", use_weighting=True, ld_alpha=0.3, f_divergence_type="js_divergence"),
    "dpo mixed": lambda: dpo_task("aot", "bco_pair", "ipo"),
    "simpo": lambda: dpo_task("simpo"),
    "kto": lambda: kto_task(desirable_weight=1.5),
}


@dataclass(frozen=True)
class Trained:
    """Results of some steps."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    engine: DeepSpeedEngine


def run_steps(
    model: str,
    task: Task,
    stage: int,
    layout: Layout,
    *,
    steps: Sequence[Sequence[int]] = STEPS,
    seed: int | None = 5,
    **zero: Any,
) -> Trained:
    """Run steps from a model folder. The reference is the model with noise on its weights, or without a seed the model
    itself.
    """
    if task.is_reward_model:
        source = ModelConfig(pretrain=model, param_dtype="fp32")
        hf_model = load_value_backbone(source, partition=partition(stage))
        module: Any = ValueModel(hf_model)
    else:
        hf_model, module = load_policy(model, stage)
    size = layout.ranks_per_sequence
    settings = DeepSpeedConfig(sequence_parallel_size=size)
    module.sequence_ranks = sequence_ranks(settings, hf_model.config)
    gather = partially(gather_rows, ranks_per_pack=layout.ranks_per_pack)
    prepare = (
        task.prepare(make_reference(model, stage, seed, size=size), gather)
        if task.prepare
        else lambda engine, batches: batches
    )
    engine = make_engine(module, stage, **layout.together(), **zero)
    metrics = []
    for indices in steps:
        micro_batches, totals = layout.share().micro_batches(task.items, np.array(indices))
        metrics.append(engine.train_step(prepare(engine, micro_batches), bind(task.objective, totals)))
    return Trained(metrics, weights_of(engine, hf_model), engine)


def make_reference(model: str, stage: int, seed: int | None, *, size: int = 1) -> FrozenEngine:
    """Load the reference. With a seed, its norms differ from the model's; ZeRO-3 does not partition such small tensors.
    `size` ranks share each sequence.
    """
    hf_model, module = load_policy(model, 0)
    module.sequence_ranks = sequence_ranks(DeepSpeedConfig(sequence_parallel_size=size), hf_model.config)
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if "norm" in name and seed is not None:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return FrozenEngine(module, DeepSpeedConfig(zero_stage=0), param_dtype="fp32")


def without_sharing(task: Task) -> Task:
    """Return the task with prompts repeated per response."""
    return replace(task, items=replace(task.items, share_prompts=False))
