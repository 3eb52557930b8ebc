"""Metric names, order and number formatting, shared by the terminal and the report."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Prefixes of keys that differ between identical runs. All other metrics are reproducible, and tests compare them.
PACK_TOKENS = "perf/pack_tokens_max"
"""Metric of a trained model: tokens per micro-batch since memory was full. Missing before."""
_MEASURED = ("time/", "perf/", "memory/")

# Metrics to show first, most important first; the rest follow in logging order.
_PROMINENT = (
    "accuracy",
    "reward",
    "teacher_kl",
    "loss",
    "policy_loss",
    "critic/value_loss",
    "kl",
    "entropy",
    "response_length",
    "truncated",
    "episode/turns",
    "grad_norm",
    "lr",
    "critic/grad_norm",
    "critic/explained_variance",
    "approx_kl",
    "rollout_k3",
    "kl_coef",
    "reward_std",
)
_TITLES = {
    "lr": "learning rate",
    "kl": "KL from reference",
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "approx_kl": "update KL (k1)",
    "approx_k3": "update KL (k3)",
    "kl_coef": "KL coefficient",
    "teacher_kl": "KL from teacher",
    "teacher_logprob": "teacher log-prob",
    "rollout_k3": "engine mismatch",
    "truncated": "truncated share",
    "grad_norm": "gradient norm",
    "critic/grad_norm": "critic grad norm",
    "critic/lr": "critic lr",
    "critic/value_loss": "value loss",
    "critic/explained_variance": "explained variance",
    "response_length": "response length",
    "episode/turns": "turns per episode",
    "episode/calls": "tool calls per episode",
    "episode/malformed_calls": "malformed calls per episode",
    "episode/observed_tokens": "observed tokens per episode",
    "episode/failed": "share of failed environments",
    "episode/truncated": "share truncated by environments",
    "episode/branches": "branches per episode",
    "episode/repeated_requests": "repeated requests per episode",
    "num_tokens": "tokens",
    "num_sequences": "sequences",
    "perf/tokens_per_second": "tokens/s",
    "perf/transfer_gb_per_s": "transfer, GB/s",
    "memory/host_gib": "host memory, GiB",
    "memory/gpu_gib_max": "GPU memory, GiB",
    "memory/forward_gib_max": "tensors of forward passes, GiB",
    "memory/train_gib_max": "tensors of training, GiB",
}
GIB = 1 << 30
EVALUATION = "eval"
"""Phase name for evaluations, which do not count toward the step time."""


@dataclass(frozen=True)
class Reading:
    """Metrics logged for one step, including measurements."""

    step: int
    metrics: Mapping[str, float]

    @property
    def phases(self) -> dict[str, float]:
        """Compute seconds by phase, with "other" for the remaining step time."""
        phases = {name.removeprefix("time/"): value for name, value in self.metrics.items() if name.startswith("time/")}
        total = phases.pop("step", None)
        # Evaluations run outside the step but are listed as a phase, so add their time to the total.
        return _with_rest(phases, None if total is None else total + phases.get(EVALUATION, 0.0))


def is_measured(name: str) -> bool:
    """Return whether the metric measures time, speed or memory."""
    return name.startswith(_MEASURED)


def prominent(names: Iterable[str]) -> list[str]:
    """Sort metric names by importance.

    Drops counts, time and memory measurements, and interval bounds.
    """
    rank = {name: position for position, name in enumerate(_PROMINENT)}
    listed = list(names)
    # X_low and X_high are interval bounds only if X is logged too: clip_low and clip_high are metrics.
    ends = {name + end for name in listed for end in ("_low", "_high")}
    kept = [name for name in listed if not is_measured(name) and not name.startswith("num_") and name not in ends]
    return sorted(kept, key=lambda name: rank.get(name.removeprefix("eval/"), len(rank)))


def shown_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the `prominent` names of metrics, without counts of skipped steps that are 0."""
    return [name for name in prominent(metrics) if metrics[name] or not name.startswith("skipped_")]


def interval(name: str, metrics: Mapping[str, float]) -> str:
    """Format a metric's confidence interval to append to the value, or "" if unknown."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return "" if low is None or high is None else f" ({number(low)} to {number(high)})"


def _with_rest(phases: Mapping[str, float], total: float | None) -> dict[str, float]:
    """Add the remaining seconds as "other", if above 1% of the total."""
    rest = 0.0 if total is None else total - sum(phases.values())
    return {**phases, "other": rest} if total and rest > 0.01 * total else dict(phases)


def title(name: str) -> str:
    """Return the display name of a metric."""
    if name.startswith("eval/"):
        return "evaluation " + title(name.removeprefix("eval/"))
    return _TITLES.get(name, name.replace("_", " "))


def number(value: float) -> str:
    """Format with up to four significant digits, at most seven characters below 10^9: 0.0312, 12.3k, 1.20e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.2e}"
    if size >= 1e4:
        return scaled(value)
    if float(value).is_integer():
        return str(int(value))
    decimals = max(0, 3 - max(0, math.floor(math.log10(size))))
    return f"{value:.{decimals if size >= 1 else 4}f}"


def scaled(value: float) -> str:
    """Format with three significant digits and k, M, G or T: 12.3k."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            share = value / unit
            return f"{share:.{2 if share < 10 else 1 if share < 100 else 0}f}{name}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format a duration: 21ms, 0.21s, 4.2s, 42s, 3:07, 1:02:40."""
    # The limits lie just below 0.1, 1 and 10, so that no value rounds up to one digit too many (0.0999 to "100ms").
    if seconds < 0.0995:
        return f"{1000 * seconds:.{1 if seconds < 0.00095 else 0}f}ms"
    if seconds < 9.95:
        return f"{seconds:.{2 if seconds < 0.995 else 1}f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
