"""Iterations of an online run that samples ahead of training, beside the run that does one after the other.

    python benchmarks/async_overlap.py [--seconds 0.2] [--iterations 30] [--lags 0 1 2] [--partial_lags 1 2]
        [--sampling 1.0] [--spread 0.0]

The loop, its thread, advantages, metrics and files are real. Engines and the actor only wait: a batch takes the engines
`--sampling` times the seconds that the actor trains on it, times a number of the batch's own, drawn evenly from
1 - `--spread` to 1 + `--spread`. Prints for each lag, without and with `--partial_rollout`, the iterations in the same
time, and the shares of it that the actor waited for a batch and that the engines waited for the actor. Exits with 1 if
lag 1 gives less than 1.8 times the iterations of lag 0 at equal and constant speed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from driver_fakes import Elsewhere, FakeEngines, FakeScorer, run_loop
from setting import machine

from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.algorithms.table import ALGORITHMS
from rlhf_cli.config.model import MovingReferenceConfig
from rlhf_cli.config.online import OnlineBatchConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import OptimConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.samples import Sample
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.tracking.sinks import read_metrics
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.state import OnlineSettings

AIM = 1.8
BATCH, SAMPLES_EACH, TOKENS = 16, 8, 64
RESPONSE = Generation(list(range(TOKENS)), [-1.0] * TOKENS, "stop", 0)


class WaitingEngines(FakeEngines):
    """Engines whose batch is there after a time; the same batches take the same times in every run."""

    def __init__(self, seconds: float, *, spread: float) -> None:
        super().__init__(Elsewhere(), num_engines=1, responses=[RESPONSE])
        self._seconds = seconds
        self._spread = spread
        self._times = np.random.default_rng(1)
        self._end = 0.0

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start the batch."""
        self._end = time.perf_counter() + self._seconds * self._times.uniform(1 - self._spread, 1 + self._spread)
        super().begin(requests, sampling)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        """Wait for the batch."""
        left = self._end - time.perf_counter()
        if left > 0:
            time.sleep(left if timeout is None else min(left, timeout))
        return super().collect() if time.perf_counter() >= self._end else []


class WaitingActor:
    """An actor whose update takes a time; its log-probs are constants."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wake(self) -> None:
        """Nothing."""

    def sleep(self) -> None:
        """Nothing."""

    def sleep_optimizer(self) -> None:
        """Nothing."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """A number for each trained token."""
        return [np.full(sequence.num_trained, -1.0, np.float32) for sequence in sequences]

    def update(
        self, samples: Sequence[Sample], steps: Sequence[np.ndarray], *, on_policy: bool, weights: LossWeights
    ) -> list[dict[str, float]]:
        """Metrics of the optimizer steps, after the time."""
        time.sleep(self._seconds)
        return [{"entropy": 1.0}] * len(steps)


@dataclass(frozen=True)
class Overlap:
    """Seconds of an iteration, and the shares of it that the actor and the engines waited for each other."""

    seconds: float
    actor_waited: float
    engines_waited: float


@dataclass(frozen=True)
class Way:
    """How far sampling is ahead, and whether pushes wait for the batch in flight."""

    lag: int
    partial: bool = False

    @property
    def name(self) -> str:
        """The first cell of a row."""
        return f"{self.lag}, partial" if self.partial else str(self.lag)


def settings_of(way: Way) -> OnlineSettings:
    """RLOO in one optimizer step without a reference, which asks nothing of other models."""
    return OnlineSettings(
        algorithm=ALGORITHMS["rloo"],
        rollout=RolloutConfig(rollout_batch_size=BATCH, n_samples_per_prompt=SAMPLES_EACH, max_new_tokens=TOKENS),
        reward=RewardConfig(reward_funcs=["exact"]),
        policy=PolicyConfig(init_kl_coef=0.0),
        batch=OnlineBatchConfig(train_batch_size=BATCH * SAMPLES_EACH),
        reference=MovingReferenceConfig(),
        optim=OptimConfig(),
        lag=way.lag,
        partial_rollout=way.partial,
    )


def overlap(way: Way, *, training: float, sampling: float, spread: float, iterations: int) -> Overlap:
    """Return the times of an iteration, over all but the first and those beside which nothing is sampled."""
    settings, total, marks = settings_of(way), iterations + way.lag + 1, list[float]()
    engines = WaitingEngines(sampling, spread=spread)
    prompts = [Prompt([1, 2, 3], "prompt", "1", "rows.jsonl", number) for number in range(BATCH * total)]
    with TemporaryDirectory() as folder:
        run_loop(
            Roles(WaitingActor(training), None, None, None, engines, FakeScorer(Elsewhere())),
            settings,
            Path(folder),
            prompts=prompts,
            decode=lambda token_ids: " ".join(map(str, token_ids)),
            iterations=total,
            after_each=lambda: marks.append(time.perf_counter()),
        )
        found = [read_metrics(Path(folder))[step] for step in range(2, iterations + 2)]
    seconds = [end - begin for begin, end in pairwise(marks)][1 : iterations + 1]
    if not way.lag:  # one waits while the other works
        return Overlap(float(np.mean(seconds)), sampling / float(np.mean(seconds)), training / float(np.mean(seconds)))
    waited, idle = (
        sum(metrics.get(name, 0.0) for metrics in found) / sum(seconds)
        for name in ("perf/sampling_wait_seconds", "perf/engines_idle_seconds")
    )
    return Overlap(float(np.mean(seconds)), waited, idle)


def table(found: dict[Way, Overlap]) -> str:
    """A line for each way, with the ratio to the first."""
    first = next(iter(found.values())).seconds
    lines = ["| lag | iterations/s | ratio | actor waited | engines waited |", "|---" * 5 + "|"]
    lines += [
        f"| {way.name} | {1 / one.seconds:.2f} | {first / one.seconds:.2f} | {one.actor_waited:.0%} "
        f"| {one.engines_waited:.0%} |"
        for way, one in found.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="of training in an iteration")
    parser.add_argument("--sampling", type=float, default=1.0, help="sampling takes so many times as long")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--partial_lags", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--spread", type=float, default=0.0, help="of the times of batches, from 0 to 1")
    args = parser.parse_args()
    print(machine(), flush=True)
    ways = [*map(Way, args.lags), *(Way(lag, partial=True) for lag in args.partial_lags)]
    times = {"training": args.seconds, "sampling": args.sampling * args.seconds, "spread": args.spread}
    found = {way: overlap(way, **times, iterations=args.iterations) for way in ways}
    print(table(found))
    is_judged = args.sampling == 1.0 and not args.spread and {Way(0), Way(1)} <= found.keys()
    return int(is_judged and found[Way(0)].seconds < AIM * found[Way(1)].seconds)


if __name__ == "__main__":
    sys.exit(main())
