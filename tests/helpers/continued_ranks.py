"""Engines that resume a checkpoint with a different number of ranks, started by `start_ranks`.

Two ranks save, the parent process resumes on one rank, and the two ranks resume from its checkpoint. The script waits
for `written_by_two` and writes `written_by_one`. Meanwhile, the two ranks resume with sequence parallelism, and then
without.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_training import OPTIM, Items, Layout, load_policy, make_engine, make_sequences, train, weights_of

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.sequence_ranks import sequence_ranks
from rlhf_cli.backends.training.weight_average import WeightAverage
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.models.policy import PolicyModel

STEPS = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9], [9, 1], [2, 3, 4], [5, 6, 0]]
"""Two ranks run the first two and the last two steps; one rank runs the two in between, or none."""
STAGES = (3, 2, 1, 0)
"""Stage 3 first: afterwards DeepSpeed computes linear layers differently, also for later engines in the process."""
RISING = OPTIM.model_copy(update={"lr_scheduler": "linear", "lr_warmup_ratio": 0.5})
"""The learning rate differs in each step."""
ROUTES = list(product(STAGES, STAGES))
SECONDS = 300.0


@dataclass
class Trained:
    """An engine with its weights and their moving average."""

    hf_model: Any
    engine: Any
    average: WeightAverage
    ranks_per_sequence: int

    def steps(self, numbers: Sequence[int]) -> list[dict[str, float]]:
        place = dist.get_rank(), dist.get_world_size()
        layout = Layout(*place, max_tokens=60, ranks_per_sequence=self.ranks_per_sequence)
        items = Items(make_sequences(10))
        metrics = []
        for number in numbers:
            metrics += train(self.engine, items, [STEPS[number]], layout)
            self.average.update()
        return metrics

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        self.engine.save(folder)
        self.average.save(folder)
        distributed.barrier()

    def load(self, folder: Path) -> None:
        self.engine.load(folder)
        self.average.load(folder)

    def found(self, metrics: list[dict[str, float]]) -> dict[str, Any]:
        """Return the results to compare."""
        average = dict(self.average.weights())
        return {"metrics": metrics, "weights": weights_of(self.engine, self.hf_model), "average": average}


def built(model: str, stage: int, dtype: str, *, ranks_per_sequence: int = 1) -> Trained:
    hf_model, _ = load_policy(model, stage, dtype=dtype)
    settings = DeepSpeedConfig(sequence_parallel_size=ranks_per_sequence)
    module = PolicyModel(hf_model, sequence_ranks(settings, hf_model.config))
    engine = make_engine(module, stage, dtype=dtype, optim=RISING, sequence_parallel_size=ranks_per_sequence)
    average = WeightAverage(list(hf_model.named_parameters()), beta=0.75)
    return Trained(hf_model, engine, average, ranks_per_sequence)


def by_two(model: str, folder: Path) -> dict[str, Any]:
    """Save at each stage, and resume from the one-rank checkpoint. Returns results by route."""
    found = {}
    for stage, dtype in product(STAGES, ("fp32", "bf16")):
        trained = built(model, stage, dtype)
        trained.steps((0, 1))
        trained.save(folder / f"two {stage} {dtype}")
        found[f"straight {stage} {dtype}"] = trained.found(trained.steps((4, 5)))
        if dtype == "fp32":
            whole = built(model, stage, dtype)
            found[f"whole {stage}"] = whole.found(whole.steps(range(6)))
    if dist.get_rank() == 0:
        (folder / "written_by_two").touch()
    found |= {f"shared {stage}": _shared_and_back(model, stage, folder) for stage in STAGES}
    wait_for(folder / "written_by_one")
    for (stage, other), dtype in product(ROUTES, ("fp32", "bf16")):
        found[f"turned {stage} {other} {dtype}"] = _gone_on(
            model, stage, dtype, folder / f"one {stage} {other} {dtype}"
        )
    for stage, other in ROUTES:
        folder_of_one = folder / f"one trained {stage} {other}"
        found[f"trained {stage} {other}"] = _gone_on(model, (other + 1) % 4, "fp32", folder_of_one)
    return found


def by_one(model: str, folder: Path) -> dict[str, Any]:
    """Resume the two-rank checkpoint on one rank, and save at another stage. Returns results by route."""
    found = {}
    wait_for(folder / "written_by_two")
    for (stage, other), dtype in product(ROUTES, ("fp32", "bf16")):
        trained = built(model, other, dtype)
        trained.load(folder / f"two {stage} {dtype}")
        trained.save(folder / f"one {stage} {other} {dtype}")
        if dtype == "fp32":
            found[f"trained {stage} {other}"] = trained.steps((2, 3))
            trained.save(folder / f"one trained {stage} {other}")
    (folder / "written_by_one").touch()
    return found


def _shared_and_back(model: str, stage: int, folder: Path) -> dict[str, Any]:
    """Resume with two ranks per sequence, then resume without sequence parallelism."""
    sharing = built(model, stage, "fp32", ranks_per_sequence=2)
    sharing.load(folder / f"two {stage} fp32")
    metrics = sharing.steps((2, 3))
    sharing.save(folder / f"shared {stage}")
    back = _gone_on(model, stage, "fp32", folder / f"shared {stage}")
    return back | {"metrics": metrics + back["metrics"]}


def _gone_on(model: str, stage: int, dtype: str, folder: Path) -> dict[str, Any]:
    trained = built(model, stage, dtype)
    trained.load(folder)
    return trained.found(trained.steps((4, 5)))


def wait_for(path: Path) -> None:
    limit = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.1)


def main(model: str, out: str) -> None:
    distributed.join_process_group()
    folder = Path(out)
    found = by_two(model, folder)
    torch.save(found, folder / f"rank{dist.get_rank()}of{dist.get_world_size()}.pt")
    distributed.leave_process_group()
