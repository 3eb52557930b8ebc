"""Runs iterations again, from a checkpoint. Writes nothing to the run directory."""

import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhf_cli.algorithms.formulas import number
from rlhf_cli.algorithms.gradient_share import Projection, compared
from rlhf_cli.algorithms.token_trace import SAMPLE, TOKEN
from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.backends.roles.groups import SampledRole
from rlhf_cli.backends.roles.watch import Place, Watch
from rlhf_cli.backends.training.checkpoint import Checkpoint, CheckpointStore, check_same_run
from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.replay import ReplayConfig
from rlhf_cli.config.base import SettingsGroup, default_settings
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.replay import ReplayGroup
from rlhf_cli.config.roles import CriticConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig, OptimConfig
from rlhf_cli.environment import resume_collector
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.runs.online.checked_run import OnlineRun, check_run
from rlhf_cli.runs.online.estimator import estimator_of
from rlhf_cli.runs.online.run import build, prepared, reserve, scorer_of
from rlhf_cli.runs.run_directory import NOT_REPEATED, begin_logs, folder_of_start, recorded_config, run_directory
from rlhf_cli.tracking.sinks import WITHOUT_TRACKERS, read_metrics
from rlhf_cli.tracking.terminal.console import quiet_process
from rlhf_cli.tracking.tracker import SilentTracker
from rlhf_cli.trainers.online.loop import ScoredBatch
from rlhf_cli.trainers.online.state import LoopState

if TYPE_CHECKING:
    from rlhf_cli.backends.roles.ranks import SampledRank

_WITHOUT_OUTPUT: dict[str, object] = {
    "ckpt_path": None,
    "save_path": None,
    "save_steps": -1,
    "load_checkpoint": False,
    "overwrite": False,
    "max_restarts": 0,
    "eval_dataset": None,
    "write_pass_rate": None,
    **WITHOUT_TRACKERS,
}
"""Settings of a replay: nothing is saved, evaluated, tracked or resumed by itself."""
_OF_THE_UPDATE = (PolicyConfig, CriticConfig, OptimConfig, BatchConfig, RewardConfig)
"""Groups of settings that a replay can change."""
_NOT_OF_THE_UPDATE = {"seed", "critic_pretrain", "reward_pretrain", "prm_pretrain"}
_OF_THE_PROMPTS = {"seed", "rollout_batch_size", "num_episodes", "max_iterations", "prompt_sampling"}
"""Settings of the rollout that affect which prompts an iteration has."""


@dataclass(frozen=True)
class Replayed:
    """An iteration that was run again.

    - `recorded`, `metrics`: metrics of the run and of the replay.
    - `rows`: rows of samples.jsonl.
    - `batch`, `state`: responses with all model outputs, and the loop's state before the iteration; None if no response
      could be trained on.
    - `trace`: columns of all trained tokens by optimizer step (algorithms/token_trace.py).
    - `gradient`, `update`: gradient of the first optimizer step, and change of the actor's weights, by name; empty
      unless requested.
    - `projections`: gradients of the requested tokens by optimizer step; `no_shares` says why there are none.
    """

    root: Path
    run: OnlineRun
    iteration: int
    recorded: dict[str, float]
    metrics: dict[str, float]
    rows: Sequence[Mapping[str, object]]
    batch: ScoredBatch | None
    state: LoopState | None
    trace: Sequence[dict[str, np.ndarray]]
    update: Mapping[str, torch.Tensor]
    projections: Sequence[Mapping[Place, Projection]] = ()
    no_shares: str | None = None
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def compared(self) -> list[str]:
        """Names of the metrics that run and replay must have in common."""
        return list(_own(self.recorded | self.metrics))

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """(metric of the run, of the replay) by name if they differ; NaN for a missing one."""
        pairs = {name: (self.recorded.get(name), self.metrics.get(name)) for name in self.compared}
        return {
            name: (math.nan if old is None else old, math.nan if new is None else new)
            for name, (old, new) in pairs.items()
            if old != new and not (old is not None and new is not None and math.isnan(old) and math.isnan(new))
        }


def run_replay(config: ReplayConfig) -> None:
    """Print an iteration of a run, the same again, and the same with other settings."""
    with folder_of_start(Path(config.replay.run).expanduser()) as root:
        _replay(config.replay, root)


def _replay(settings: ReplayGroup, root: Path) -> None:
    changes = _changes(settings.set or [])
    own: OnlineConfig = recorded_config(root, ONLINE_TRAINING)
    changed = None
    if changes or settings.sample_again:
        changed = _changed(root, own, changes, samples_again=settings.sample_again)
    # Before the first of two replays, which can take minutes.
    _checkpoint_before(own, settings.iteration, is_next=changed is not None)
    again = replay(own, settings.iteration, keeps_update=changed is not None)
    other = None if changed is None else replay(own, settings.iteration, changed=changed, keeps_update=True)
    print("\n".join(comparison(again, other, changes, samples_again=settings.sample_again)))


def _changes(words: Sequence[str]) -> dict[str, str]:
    """Return settings by name. Raises UsageError if a word is not NAME=VALUE."""
    for word in words:
        if "=" not in word:
            raise UsageError(f"--set {word}: write NAME=VALUE, like --set eps_clip=0.3,init_kl_coef=0")
    return {name.strip().lstrip("-"): value.strip() for name, _, value in (word.partition("=") for word in words)}


def _changed(root: Path, own: OnlineConfig, changes: Mapping[str, str], *, samples_again: bool) -> OnlineConfig:
    """Return the settings with changes. Raises UsageError if one affects more than the update, and with `samples_again`
    than sampling.
    """
    if samples_again and own.asynchronous.staleness:
        raise UsageError("--sample_again: the run has sampled these responses iterations before, with --async_train")
    for name in changes:
        groups = [settings for group, settings in own if name in own.supported(group)]
        if groups and not _can_change(groups[0], name, samples_again=samples_again):
            kept = "models or prompts" if samples_again else "models, prompts or sampling"
            raise UsageError(
                f"--set {name}: it affects {kept}, which stay those of the run; set settings of the update, such as "
                "eps_clip, init_kl_coef, actor_learning_rate or train_batch_size, and with --sample_again of sampling, "
                "such as temperature"
            )
    seed = {"rollout_seed": (own.rollout.sampling_seed(own.batch.seed) + 1) % 2**32} if samples_again else {}
    config: OnlineConfig = recorded_config(root, ONLINE_TRAINING, {**seed, **changes})
    return config


def _can_change(group: SettingsGroup, name: str, *, samples_again: bool) -> bool:
    if isinstance(group, RolloutConfig):
        return samples_again and name not in _OF_THE_PROMPTS
    return isinstance(group, _OF_THE_UPDATE) and name not in _NOT_OF_THE_UPDATE


def comparison(
    again: Replayed, other: Replayed | None, changes: Mapping[str, str], *, samples_again: bool = False
) -> list[str]:
    """Return a table of the metrics that differ, and how far apart the updates are."""
    head = f"iteration {again.iteration} of rlhf {again.run.config.command} in {again.root}"
    same = (
        "Equal to the run: all metrics of the iteration"
        if not again.differences
        else f"Different from the run in {listed(again.differences)}: on another machine or with other versions"
    )
    if other is None:
        return [head, same, *(f"  {name:28}{number(value):>14}" for name, value in sorted(_own(again.metrics).items()))]
    names = [name for name in _own(again.metrics) if again.metrics[name] != other.metrics.get(name)]
    rows = [
        f"  {name:28}{number(again.metrics[name]):>14}{number(other.metrics.get(name, math.nan)):>14}"
        for name in sorted(names)
    ]
    settings = [*(["new samples"] if samples_again else []), *(f"{name}={value}" for name, value in changes.items())]
    columns = f"  {'':28}{'run':>14}{'changed':>14}   {' '.join(settings)}"
    return [head, same, "", columns, *rows, "", *_apart(again, other, samples_again=samples_again)]


def _own(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_REPEATED)}


def _apart(again: Replayed, other: Replayed, *, samples_again: bool) -> Iterator[str]:
    """Yield the cosines of gradients and weight updates, and how many tokens are clipped or corrected differently."""
    if again.gradient and other.gradient:
        yield f"  cosine of the gradients of the first optimizer step {_cosine(again.gradient, other.gradient)}"
    elif again.update and again.run.config.deepspeed_of("actor").tensor_parallel_size > 1:
        yield "  cosine of the gradients: not computed with --tensor_parallel_size, whose ranks have parts of them"
    if again.update and other.update:
        yield f"  cosine of the weight updates {_cosine(again.update, other.update)}"
    if samples_again:
        return
    texts = [[row["response"] for row in one.rows] for one in (again, other)]
    if texts[0] != texts[1]:
        yield "  the engine sampled different responses, so the settings are not the only cause"
    if isinstance(again.run.config, GKDConfig):
        return
    marks = ("clip_low", "clip_high", "clip_dual", "corrected")
    flags = [_by_token(one, marks) for one in (again, other)]
    if flags[0].keys() != flags[1].keys():  # such as with mask_truncated
        yield "  different responses are trained on, so tokens are not compared"
        return
    differing = sum(flags[0][place] != flags[1][place] for place in flags[0])
    yield f"  {differing} of {len(flags[0])} tokens are clipped or corrected differently"


def _cosine(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    found = compared(one, other)
    return f"{number(found.cosine)}, norms {number(found.norm)} and {number(found.step_norm)}"


def _by_token(replayed: Replayed, names: Sequence[str]) -> dict[tuple[float, float], list[tuple[float, ...]]]:
    """Return these columns of each token by sequence and token, over the optimizer steps."""
    found: dict[tuple[float, float], list[tuple[float, ...]]] = {}
    for columns in replayed.trace:
        values = zip(*(columns[name].tolist() for name in names), strict=True)
        for sample, token, flags in zip(columns[SAMPLE].tolist(), columns[TOKEN].tolist(), values, strict=True):
            found.setdefault((sample, token), []).append(flags)
    return found


def replay(
    config: OnlineConfig,
    iteration: int,
    *,
    changed: OnlineConfig | None = None,
    keeps_update: bool = False,
    tokens: Callable[[ScoredBatch], Sequence[Place]] = lambda batch: (),
) -> Replayed:
    """Run an iteration again, with the samples and weights that the run had.

    Args:
        config: settings of the run, with its directory as `output`.
        iteration: number of the iteration, from 1.
        changed: settings of this iteration. The iterations between the checkpoint and this one must have the run's, so
            a checkpoint directly before it is required.
        keeps_update: whether to return the change of the weights, which requires a checkpoint directly before it.
        tokens: tokens of the batch whose gradients are computed.

    Raises:
        UsageError: the run has no such iteration, or its model or data have changed.
    """
    root = Path(config.checkpoint.output)
    resume = _checkpoint_before(config, iteration, is_next=changed is not None)
    # Kept after other errors than UsageError: they name the logs in it.
    folder = Path(tempfile.mkdtemp(prefix="rlhf-replay-"))
    results = _Results(tokens)
    try:
        run = _checked(config, folder)
        if resume is not None:
            check_same_run(resume, run.identity, default_settings(run.config), repeats=True)
        if changed is not None:
            run = _checked(changed, folder)
            resume = resume and _with_coefficients(resume, config, changed)
        _run_again(replace(run, resume=resume), results, last=iteration, keeps_update=keeps_update)
    except UsageError:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    return Replayed(
        root,
        run,
        iteration,
        read_metrics(root)[iteration],
        results.metrics,
        results.rows,
        results.batch,
        results.before,
        results.trace,
        results.update,
        results.projections,
        results.no_shares,
        results.gradient,
    )


def _checkpoint_before(config: OnlineConfig, iteration: int, *, is_next: bool) -> Checkpoint | None:
    """Return the last checkpoint before an iteration, None for the start of the run.

    Raises:
        UsageError: the run has no such iteration, or with `is_next`, no checkpoint directly before it.
    """
    root = Path(config.checkpoint.output)
    # Step 0 is the evaluation before training.
    numbers = sorted(step for step in read_metrics(root) if step > 0)
    if iteration not in numbers:
        known = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has none"
        raise UsageError(f"{root} has no iteration {iteration}: {known}")
    store = CheckpointStore(run_directory(config.checkpoint).checkpoints, max_num=1)
    resume = store.latest(at_most=iteration - 1)
    if is_next and (resume.step if resume else 0) != iteration - 1:
        raise UsageError(
            f"--iteration {iteration}: with --set, it must follow a checkpoint or the start of {root}: set "
            f"{listed((str(step + 1) for step in [0, *store.steps()] if step + 1 in numbers), 'or')}"
        )
    return resume


def _checked(config: OnlineConfig, folder: Path) -> OnlineRun:
    own = config.updated({**_WITHOUT_OUTPUT, "output": str(folder)})
    return check_run(own, estimator_of(own))


def _with_coefficients(resume: Checkpoint, config: OnlineConfig, changed: OnlineConfig) -> Checkpoint:
    """Replace the controlled coefficients in the state of the loop by changed initial ones."""
    pairs = (("kl_coef", "init_kl_coef"), ("entropy_coef", "entropy_loss_coef"))
    own = {
        coef: getattr(changed.policy, name)
        for coef, name in pairs
        if getattr(changed.policy, name) != getattr(config.policy, name)
    }
    return replace(resume, state={**resume.state, "loop": {**resume.state["loop"], **own}})


@dataclass
class _Results(SilentTracker):
    """Keeps the results of the last iteration that ran. `tokens`: as of `replay`."""

    tokens: Callable[[ScoredBatch], Sequence[Place]]
    metrics: dict[str, float] = field(default_factory=dict)
    rows: Sequence[Mapping[str, object]] = ()
    batch: ScoredBatch | None = None
    before: LoopState | None = None
    trace: Sequence[dict[str, np.ndarray]] = ()
    step: int = 0
    update: dict[str, torch.Tensor] = field(default_factory=dict)
    projections: Sequence[Mapping[Place, Projection]] = ()
    no_shares: str | None = None
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def log(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """Keep the metrics."""
        self.step, self.metrics = step, dict(metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep the rows."""
        self.rows = rows

    def message(self, text: str) -> None:
        """Print a line."""
        self.say(text)


def _run_again(run: OnlineRun, results: _Results, *, last: int, keeps_update: bool) -> None:
    """Run the iterations after the checkpoint, up to `last`."""
    stop = StopSignal()
    begin_logs(run.paths, keep=False)
    with ExitStack() as stack:
        terminal = stack.enter_context(quiet_process(run.paths.logs / "driver.log"))
        results.say = terminal.console.print
        run, where = reserve(run, stack)
        roles = stack.enter_context(build(run, where))
        if run.episodes is not None:
            roles.rollout = stack.enter_context(run.episodes.played_by(roles.engines))
        scorer = stack.enter_context(scorer_of(run, roles, results.message))
        resume_collector()
        actor = roles.actor
        results.no_shares = no_shares(run.config)

        # With tensor parallelism, a rank has only a part of the gradient.
        keeps_gradient = keeps_update and run.config.deepspeed_of("actor").tensor_parallel_size == 1

        def updates(batch: ScoredBatch | None, state: LoopState) -> None:
            if state.iteration == last - 1:
                results.batch, results.before = batch, state
                tokens = () if batch is None or results.no_shares else tuple(results.tokens(batch))
                actor.watch = Watch(tokens, keeps_gradient=keeps_gradient)

        def ends() -> bool:
            return results.step == last or stop()

        train, _ = prepared(run, roles, scorer, results, ends, updates=updates, saves=False)
        before = _weights(actor) if keeps_update else {}
        train()
        if results.step != last:  # interrupted: these are the results of a different iteration
            sys.exit(INTERRUPTED)
        if results.batch is not None:
            results.batch.trainable.read_stored()
        results.trace, results.projections = actor.trace, actor.projections
        if keeps_update:
            results.gradient = actor.gradient()
            results.update = {name: weight - before[name] for name, weight in _weights(actor).items()}


def no_shares(config: OnlineConfig) -> str | None:
    """Return why the gradients of single tokens cannot be computed; None if they can."""
    settings = config.deepspeed_of("actor")
    if settings.zero_stage == 3:
        return "with zero_stage 3, ranks have the weights of a layer only during the passes of an optimizer step"
    if settings.ranks_per_pack > 1:
        return "ranks that share sequences or layers have only parts of a token's gradient"
    if (
        isinstance(config, GKDConfig)
        and config.deepspeed_of("teacher").zero_stage == 3
        and config.num_ranks("actor") > 1
    ):
        return "with teacher_zero_stage 3, ranks compute the teacher's hidden states together"
    if config.adapter.lora_dropout or config.model.keep_dropout:
        return "with dropout, a second forward pass is not that of the optimizer step"
    return None


def _weights(actor: SampledRole) -> dict[str, torch.Tensor]:
    """Return the trained weights in host memory, float32."""
    buckets = []
    with actor.awake():
        for place in range(actor.group.all(lambda rank: rank.num_buckets())[0]):
            buckets.append(actor.group.all(partial(_bucket, place))[0])
    return {name: weight.float() for bucket in buckets for name, weight in bucket.items()}


def _bucket(number: int, rank: "SampledRank") -> dict[str, torch.Tensor]:
    return rank.bucket(number)
