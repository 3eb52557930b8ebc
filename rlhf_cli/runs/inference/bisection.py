"""Finds the checkpoint at which a metric broke, by binary search on paired evaluations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhf_cli.backends.training.checkpoint import CheckpointStore
from rlhf_cli.backends.training.checkpoint_layout import DEEPSPEED
from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import flags_of
from rlhf_cli.rewards.evaluation import is_quality
from rlhf_cli.runs.inference.outputs import EvalOutput
from rlhf_cli.runs.inference.paired import Comparison, Paired, compared
from rlhf_cli.runs.run_directory import recorded_command, recorded_settings, run_directory
from rlhf_cli.tracking.sinks import read_metrics

_OF_TRAINING = (
    "prompt_data",
    "prompt_data_probs",
    "pass_rate_range",
    "rollout_batch_size",
    "colocate_all_models",
    "reward_num_gpus_per_node",
    "prm_pretrain",
    "prm_aggregation",
)
"""Training settings that an evaluation does not share."""
OF_THE_OUTPUT = ("pretrain", "output", "load_checkpoint", "overwrite", "write_pass_rate", "print_samples")
"""Evaluation settings that are never adopted."""
_RENAMED = {
    "prompt_data": "eval_dataset",
    "prompt_split": "eval_split",
    "max_samples": "eval_max_samples",
    "n_samples_per_prompt": "eval_n_samples_per_prompt",
    "temperature": "eval_temperature",
}
"""`rlhf eval` settings, and their names in online training."""
_OF_ANY_RUN = ("tokenizer_chat_template", "trust_remote_code", "param_dtype", "max_len", "seed")
"""Offline training settings that an evaluation shares."""


@dataclass(frozen=True)
class Point:
    """A checkpoint, the final model, or at step 0 the initial one. `logged` holds the run's own evaluation metrics."""

    step: int
    path: Path
    logged: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name in tables: `step 20`, `initial model`, or `model` for the final one."""
        if self.step == 0:
            return "initial model"
        return self.path.name if self.path.name == "model" else f"step {self.step}"


@dataclass(frozen=True)
class RecordedRun:
    """A run and sorted checkpoints.

    The final model is the last one, unless the last checkpoint equals it. The initial model is the first one if the run
    evaluated it.
    """

    command: str
    settings: Mapping[str, Any]
    points: Sequence[Point]

    def without_logged(self) -> "RecordedRun":
        """Return the run without logged metrics, and thus without the initial model."""
        return replace(self, points=[replace(point, logged={}) for point in self.points if point.step])

    def evaluation_settings(self) -> dict[str, Any]:
        """Return settings for evaluations like those during training."""
        if self.command not in ONLINE_TRAINING:
            return {name: self.settings[name] for name in _OF_ANY_RUN if self.settings.get(name) is not None}
        names = flags_of(EvalConfig).keys() - {*_OF_TRAINING, *_RENAMED, *OF_THE_OUTPUT}
        own = {name: value for name, value in self.settings.items() if name in names}
        renamed = {name: self.settings.get(other) for name, other in _RENAMED.items()}
        return own | {name: value for name, value in renamed.items() if value is not None}


@dataclass
class Bisection:
    """Some evaluated checkpoints, each compared with the reference.

    - `metric`: the decisive metric. `is_best`: the reference has the best logged value, otherwise it is the first.
    - `compared`: comparison by point; A is the reference.
    - `broken`: the first point at which the metric differs from the reference; None if no difference is shown.
    """

    metric: str
    points: Sequence[Point]
    reference: Point
    is_best: bool
    compared: dict[int, Comparison] = field(default_factory=dict)
    broken: Point | None = None

    def paired(self, point: Point) -> Paired:
        """Compare the decisive metric at a point."""
        return self.compared[point.step].decisive

    def as_dict(self) -> dict[str, object]:
        """Return all numbers for JSON."""
        evaluated = [
            {"step": point.step, "path": str(point.path), **self.paired(point).as_dict()}
            for point in self.points
            if point.step in self.compared
        ]
        broken = None if self.broken is None else self.broken.step
        return {"metric": self.metric, "reference": self.reference.step, "broken": broken, "checkpoints": evaluated}


def recorded_run(root: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        UsageError: it is not one, or has fewer than two checkpoints.
    """
    command = recorded_command(root, source=str(root))
    settings = recorded_settings(root)
    places = {name: settings.get(name) for name in ("ckpt_path", "save_path")}
    paths = run_directory(CheckpointConfig(output=str(root), **places))
    metrics = read_metrics(root)
    logged = {
        step: {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
        for step, values in metrics.items()
    }
    store = CheckpointStore(paths.checkpoints, max_num=1)
    places_by_step = {step: _policy(store.path(step)) for step in store.steps()}
    last = max(metrics, default=0)
    if (paths.model / "config.json").is_file() or (paths.model / "adapter_config.json").is_file():
        places_by_step.setdefault(last, paths.model)
    points = [Point(step, path, logged.get(step, {})) for step, path in sorted(places_by_step.items())]
    if len(points) < 2:
        raise UsageError(
            f"{root} has {len(points)} checkpoints, but --bisect requires two: save more with --save_steps and "
            "--max_ckpt_num"
        )
    if logged.get(0):
        points.insert(0, Point(0, Path(str(settings["pretrain"])), logged[0]))
    return RecordedRun(command, settings, points)


def _policy(checkpoint: Path) -> Path:
    """Return the policy path in a checkpoint, which may hold a critic, too."""
    engines = list(checkpoint.glob(f"*/{DEEPSPEED}"))
    return checkpoint / "actor" if len(engines) > 1 else checkpoint


def bisected(run: RecordedRun, evaluate: Callable[[Point], EvalOutput], *, metric: str | None) -> Bisection:
    """Search for the first checkpoint at which a metric is worse than at the reference.

    The reference is the checkpoint with the best logged metric, or the first one. A metric that measures no quality,
    such as `response_length`, breaks in the direction of the last checkpoint. The search assumes that a broken metric
    stays broken; it starts at the largest drop between logged values.
    """
    logged = metric or next((name for name in ("accuracy", "reward") if name in run.points[-1].logged), "accuracy")
    values = [point.logged.get(logged) for point in run.points]
    known = [at for at, value in enumerate(values) if value is not None]
    best = max(known, key=lambda at: values[at] or 0.0, default=None) if is_quality(logged) else None
    # If the last one is the best, it can still be compared with the first one.
    start = 0 if best is None or best == len(values) - 1 else best
    outputs = evaluate(run.points[start]), evaluate(run.points[-1])
    last = compared(*outputs, metric=metric)
    found = Bisection(last.metric, run.points, run.points[start], start == best)
    found.compared[run.points[-1].step] = last
    sign = -1 if is_quality(last.metric) or last.decisive.difference < 0 else 1

    def is_broken(at: int) -> bool:
        point = run.points[at]
        if point.step not in found.compared:
            found.compared[point.step] = compared(outputs[0], evaluate(point), metric=last.metric)
        pair = found.paired(point)
        return pair.is_shown and sign * pair.difference > 0

    if not is_broken(len(values) - 1):
        return found
    found.broken = run.points[first_true(start, len(values) - 1, is_broken, _drops(values))]
    return found


def first_true(low: int, high: int, is_true: Callable[[int], bool], hints: Sequence[int] = ()) -> int:
    """Return the first index in (low, high] at which `is_true` holds, which it does at `high` and above the first.

    `hints` are tried before middles.
    """
    for at in hints:
        if low < at < high:
            low, high = (low, at) if is_true(at) else (at, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_true(middle) else (middle, high)
    return high


def _drops(values: Sequence[float | None]) -> list[int]:
    """Return the index after the largest logged drop, and the one before it."""
    drops = {
        at: before - after
        for at, (before, after) in enumerate(pairwise(values), 1)
        if before is not None and after is not None
    }
    if not drops:
        return []
    at = max(drops, key=lambda place: drops[place])
    return [at, at - 1]
