"""Alarms: rules over the logged metrics of a training run. docs/howto/alarms.md has causes and flags for each.

Thresholds and rates come from runs with injected faults (docs/benchmarks.md). Rules only read metrics, so they
never influence training.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 33
"""Number of steps that rules see: the current one and 32 earlier ones."""
_History = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Alarm:
    """An alarm.

    - `rule`: returns the reason with its numbers if the last row of the history is unhealthy, else None. A row has the
      metrics of a step; any may be missing, NaN or infinite.
    - `fix`: what to change first.
    """

    name: str
    rule: Callable[[_History], str | None]
    fix: str

    @property
    def page(self) -> str:
        """Section of the documentation."""
        return f"docs/howto/alarms.md#{self.name}"


def alarms_of(history: Iterable[Mapping[str, float]]) -> dict[Alarm, str]:
    """Return the alarms of the last row, with their reasons."""
    rows = list(history)
    reasons = {alarm: alarm.rule(rows) for alarm in ALARMS}
    return {alarm: reason for alarm, reason in reasons.items() if reason is not None}


def _values(history: _History, name: str) -> list[float]:
    """Return the finite values of a metric, without rows that lack it."""
    return [row[name] for row in history if math.isfinite(row.get(name, math.nan))]


def _now(history: _History, name: str) -> float:
    """Return the last row's value of a metric. NaN, which no limit exceeds, if it is missing or not finite."""
    return next(iter(_values(history[-1:], name)), math.nan)


def _lasts(history: _History, name: str, holds: Callable[[float], bool], num_rows: int) -> bool:
    """Return whether a metric fulfils a condition in each of the last rows."""
    values = _values(history[-num_rows:], name)
    return len(values) == num_rows and all(map(holds, values))


def _start(history: _History, name: str) -> float:
    """Return the median of the first four values in the window, NaN if the last row is one of them."""
    values = _values(history[:-1], name)[:4]
    return median(values) if len(values) == 4 else math.nan


# Healthy runs reach 0.2 in their first iterations, with learning rates at the edge of stability.
_MOVED, _KL_PER_TOKEN = 0.4, 50.0


def _kl_spike(history: _History) -> str | None:
    moved, kl = _now(history, "approx_k3"), _now(history, "kl") / max(_now(history, "response_length"), 1.0)
    if moved > _MOVED:
        return f"an update moved the policy by {moved:.2g} nats per token (approx_k3, limit {_MOVED:g})"
    if kl > _KL_PER_TOKEN:
        return f"kl from the reference is {kl:.2g} nats per token (limit {_KL_PER_TOKEN:g})"
    return None


# One update at usual learning rates moves the policy by less, and so does rounding to bf16.
_MISMATCH = 0.01


def _engine_mismatch(history: _History) -> str | None:
    # Asynchronous engines are behind on purpose. Only tokens of the current weights compare engine and trainer.
    name = "rollout_k3_current" if "staleness/mean" in history[-1] else "rollout_k3"
    if not _lasts(history, name, lambda k3: k3 > _MISMATCH, 2):
        return None
    return f"{name} is {history[-1][name]:.2g} in two iterations (limit {_MISMATCH:g})"


def _dead_reward(history: _History) -> str | None:
    name = "frac_reward_zero_std" if "frac_reward_zero_std" in history[-1] else "reward_std"
    dead, where = (1.0, "within each group") if name == "frac_reward_zero_std" else (0.0, "of all responses")
    if "response_length" not in history[-1] or not _lasts(history, name, lambda value: value == dead, 3):
        return None
    return f"rewards {where} are equal in three iterations, with mean {_now(history, 'reward'):.2g}: nothing is learned"


def _length_drift(history: _History) -> str | None:
    start, now = _start(history, "response_length"), _now(history, "response_length")
    if not now > 2 * start:
        return None
    return f"response_length doubled from {start:.4g} to {now:.4g} tokens in {len(history)} iterations"


def _loss_spike(history: _History) -> str | None:
    earlier, now = _values(history[:-1], "loss")[-16:], _now(history, "loss")
    usual = median(earlier) if len(earlier) > 1 else math.nan
    # Losses near 0, as of a trained reward model, vary by more than a factor of 2.
    if not now > max(2 * usual, usual + 0.5):
        return None
    return f"loss is {now:.3g}, with a median of {usual:.3g} before"


ALARMS = (
    Alarm("kl-spike", _kl_spike, "lower --actor_learning_rate"),
    Alarm("engine-mismatch", _engine_mismatch, "keep --rollout_correction, and compare with --param_dtype fp32"),
    Alarm("dead-reward", _dead_reward, "test the reward with rlhf data --rewards"),
    Alarm("length-drift", _length_drift, "read the longest responses, and try --overlong_buffer_len"),
    Alarm("loss-spike", _loss_spike, "look at the rows (rlhf why RUN --step N), lower the learning rate or --max_norm"),
)
