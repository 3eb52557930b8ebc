"""Time that the driver of an online run takes for an iteration beside what models, engines and rewards take.

    python benchmarks/controller_time.py [--samples 16 64 256 1024 4096] [--ranks 1 8 64] [--iterations 6]

The loop, dealing to ranks and engines, making bytes of what travels, decoding, advantages, metrics and samples with
their files are real and count; ranks, engines and rewards are fakes whose time does not (driver_fakes.py). It is PPO
with a critic and a reference in two optimizer steps, the most that a driver has to do. Prints milliseconds an
iteration and by which power of the samples they grow, and writes a chart. Exits with 1 if the growth is not linear.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import numpy as np
from driver_fakes import POLICY_MOMENTS, VALUE_MOMENTS, Elsewhere, FakeEngines, FakeRanks, FakeScorer, run_loop
from setting import machine, word_problem

from rlhf_cli.algorithms.table import ALGORITHMS
from rlhf_cli.backends.roles.groups import ActorRole, CriticRole, Dealer, FrozenRole, ReferenceRole, TrainedRole
from rlhf_cli.config.model import MovingReferenceConfig
from rlhf_cli.config.online import ActorCriticBatchConfig
from rlhf_cli.config.policy import ActorCriticPolicyConfig
from rlhf_cli.config.rollout import RolloutConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import OptimConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.models.scratch import train_tokenizer
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.state import OnlineSettings

LIMIT = 1.1  # power of the samples: small iterations scatter by some percent
SAMPLES_EACH = 8  # of a prompt
STEPS = 2  # optimizer steps of an iteration
MAX_NEW_TOKENS = 256  # of which responses have half on average
QUADRATIC_COST = 1e-4  # of a sequence's squared length, in what ranks are balanced by
WARM_UP_ITERATIONS = 1
Times = Mapping[int, Mapping[int, float]]
"""Seconds an iteration by number of ranks and of samples."""


class Material:
    """Prompts, responses and a tokenizer for all runs."""

    def __init__(self, num_prompts: int) -> None:
        rng = random.Random(0)
        rows = [word_problem(rng) for _ in range(num_prompts)]
        self.tokenizer = train_tokenizer((text for row in rows[:4000] for text in row.values()), vocab_size=4096)
        texts = [row["question"] for row in rows]
        ids = self.tokenizer(texts)["input_ids"]
        self.prompts = [Prompt(ids[i], texts[i], rows[i]["answer"], "rows.jsonl", i) for i in range(num_prompts)]
        self.responses = [self._response(rng.randint(1, MAX_NEW_TOKENS), rng) for _ in range(1000)]

    def _response(self, length: int, rng: random.Random) -> Generation:
        token_ids = [rng.randrange(len(self.tokenizer)) for _ in range(length)]
        logprobs = [-rng.random() for _ in token_ids]
        return Generation(token_ids, logprobs, "length" if length == MAX_NEW_TOKENS else "stop", 0)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def settings_of(num_samples: int) -> OnlineSettings:
    """PPO in several optimizer steps on so many samples an iteration."""
    return OnlineSettings(
        algorithm=ALGORITHMS["ppo"],
        rollout=RolloutConfig(
            rollout_batch_size=num_samples // SAMPLES_EACH,
            n_samples_per_prompt=SAMPLES_EACH,
            max_new_tokens=MAX_NEW_TOKENS,
        ),
        reward=RewardConfig(reward_funcs=["exact"]),
        policy=ActorCriticPolicyConfig(),
        batch=ActorCriticBatchConfig(train_batch_size=num_samples // STEPS),
        reference=MovingReferenceConfig(),
        optim=OptimConfig(),
    )


def fake_roles(elsewhere: Elsewhere, settings: OnlineSettings, *, num_ranks: int, material: Material) -> Roles:
    """The roles as a run has them, their ranks and engines fakes, so many of each."""
    dealer = Dealer(num_ranks, settings.batch, QUADRATIC_COST, do_share_prompts=lambda: True)

    def ranks(moments: Sequence[str] = ()) -> Any:  # in place of a WorkerGroup
        return FakeRanks(elsewhere, moments=moments)

    actor, critic = (
        TrainedRole(ranks(moments), dealer, takes_turns=False) for moments in (POLICY_MOMENTS, VALUE_MOMENTS)
    )
    reference = ReferenceRole(FrozenRole(ranks(), dealer, takes_turns=False), actor=actor, alpha=0.0)
    engines = FakeEngines(elsewhere, num_engines=num_ranks, responses=material.responses)
    return Roles(ActorRole(actor), CriticRole(critic), reference, None, engines, FakeScorer(elsewhere))


def iteration_seconds(material: Material, *, num_samples: int, num_ranks: int, iterations: int) -> list[float]:
    """Return the driver's own seconds for each iteration of a run, without warm-up."""
    elsewhere, settings = Elsewhere(), settings_of(num_samples)
    marks: list[float] = []
    total = iterations + WARM_UP_ITERATIONS
    with TemporaryDirectory() as folder:
        run_loop(
            fake_roles(elsewhere, settings, num_ranks=num_ranks, material=material),
            settings,
            Path(folder),
            prompts=material.prompts[: total * settings.rollout.rollout_batch_size],
            decode=material.decode,
            iterations=total,
            after_each=lambda: marks.append(time.perf_counter() - elsewhere.seconds),
        )
    return [end - begin for begin, end in pairwise(marks)][WARM_UP_ITERATIONS:]


def growth(seconds: Mapping[int, float]) -> float:
    """The power of the samples by which time grows: 1 is linear, less where every iteration has a fixed part.

    Least squares over the logarithms of the larger half of the sizes, in which the fixed part counts least.
    """
    sizes = sorted(seconds)[-max(2, (len(seconds) + 1) // 2) :]
    return float(np.polyfit(np.log(sizes), np.log([seconds[size] for size in sizes]), deg=1)[0])


def table(times: Times) -> str:
    """Milliseconds an iteration, a line for each number of samples, a column for each number of ranks."""
    names = [f"{ranks} ranks, ms" for ranks in times]
    lines = [f"| samples | {' | '.join(names)} | us a sample |", "|---" * (len(names) + 2) + "|"]
    for size in next(iter(times.values())):
        row = [seconds[size] for seconds in times.values()]
        cells = " | ".join(f"{1e3 * value:,.1f}" for value in row)
        lines.append(f"| {size:,} | {cells} | {1e6 * max(row) / size:,.0f} |")
    powers = " | ".join(f"{growth(seconds):.2f}" for seconds in times.values())
    return "\n".join([*lines, f"| power of the samples | {powers} | |"])


def page(times: Times) -> str:
    """The table and a chart over the samples."""
    from rlhf_cli.tracking.report.charts import Series, line_chart
    from rlhf_cli.tracking.report.page import packaged

    series = [
        Series(f"{ranks} ranks", [(size, 1e3 * value) for size, value in seconds.items()], colour=number, marked=True)
        for number, (ranks, seconds) in enumerate(times.items(), start=1)
    ]
    legend = " ".join(f'<b style="color: var(--c{line.colour})">{line.name}</b>' for line in series)
    chart = line_chart(series, unit="samples", size=(720, 300))
    body = f"<p class=small>{escape(machine())}</p><h3>ms {legend}</h3>{chart}<pre>{escape(table(times))}</pre>"
    style = packaged("page.css")
    return f"<!doctype html><meta charset=utf-8><title>Driver</title><style>{style}</style><main>{body}</main>"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "rlhf-benchmark", help="kept and reused")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--iterations", type=int, default=6)
    args = parser.parse_args()
    if len(args.samples) < 2 or any(size % (SAMPLES_EACH * STEPS) for size in args.samples):
        parser.error(f"--samples must be two or more multiples of {SAMPLES_EACH * STEPS}")
    args.folder.mkdir(parents=True, exist_ok=True)
    material = Material(max(args.samples) // SAMPLES_EACH * (args.iterations + WARM_UP_ITERATIONS))
    print(machine(), flush=True)
    times: dict[int, dict[int, float]] = {}
    for ranks in args.ranks:
        times[ranks] = {}
        for size in sorted(args.samples):
            found = iteration_seconds(material, num_samples=size, num_ranks=ranks, iterations=args.iterations)
            times[ranks][size] = statistics.median(found)
            print(f"  {size} samples, {ranks} ranks: {1e3 * times[ranks][size]:.1f} ms", flush=True)
    print(f"\n{table(times)}")
    chart = args.folder / "controller.html"
    chart.write_text(page(times), encoding="utf-8")
    print(f"\n{chart}")
    return int(max(growth(seconds) for seconds in times.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
