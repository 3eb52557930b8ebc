"""Measure the work of the driver in online runs on 8 to 1,024 simulated GPUs.

    python benchmarks/scaling.py [--sizes GPUS:PROMPTS:TOKENS ...] [--profile FILE]

Settings, loop, role groups, engine group, packing, reward workers, tracker and Ray are the program's own. One Ray
process stands in for all engines and ranks. It answers at once, but responses come in as many calls as in the planned
time. The driver's share relates it to the seconds that `rlhf plan` forecasts for the iteration (grpo with
Qwen2.5-7B on H100s, 16 samples per prompt, responses of up to 15,872 tokens, half of that on average).

A size is GPUS:PROMPTS:TOKENS, with the mean number of tokens per response. CPU time includes Ray's threads in the
driver. While engines sample, the driver's work delays nothing; outside of it, engines and ranks wait for the driver.
"""

import argparse
import cProfile
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from common import FOLDER, machine, make_parser, peak_memory, table, word_problem
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.roles.groups import ActorRole, FrozenPolicyRole, WorkerGroup
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.serialization import RankWork, store, store_arrays
from rlhf_cli.backends.roles.start import COLLECT_SECONDS
from rlhf_cli.backends.rollout.engine import Arrivals, EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import decoded
from rlhf_cli.backends.weight_sync.transfer import PushReport
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, GenerationRequest
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.environment import SELDOM, resume_collector
from rlhf_cli.options import typer_command
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.planner import Plan, make_plan
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.tracking.tracker import Tracker
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks, train_online
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import OnlineSettings, first_state

SIZES = ("8:512:512", "64:1024:512", "512:256:7936", "512:4096:496", "1024:256:7936", "1024:4096:496")
COMMAND = "--pretrain Qwen/Qwen2.5-7B --prompt_data prompts.jsonl --reward_funcs gsm8k --gpu h100"
SAMPLES_EACH, PROMPT_TOKENS = 16, 256
HEAD = (
    "GPUs | samples | tokens | driver, CPU s | share | outside sampling, CPU s | share | calls | received, MiB | "
    "sent, MiB | store, MiB | peak, MiB"
)
INLINE_BYTES = 100 * 1024
"""Ray sends larger arguments and results through its object store."""
VOCABULARY = 4096
STREAM_TOKENS = 200_000
MIB = 1 << 20


@dataclass(frozen=True)
class Size:
    """GPUs, and prompts of an iteration with the mean tokens of a response."""

    gpus: int
    prompts: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> "Size":
        """Read GPUS:PROMPTS:TOKENS."""
        return cls(*map(int, text.split(":")))


def config_of(size: Size, *more: str) -> Any:
    """Return the settings of a `rlhf plan grpo` command line, which the loop reads too."""
    samples = size.prompts * SAMPLES_EACH
    nodes = f"--num_gpus {min(8, size.gpus)} --num_nodes {max(1, size.gpus // 8)}"
    batch = f"--rollout_batch_size {size.prompts} --n_samples_per_prompt {SAMPLES_EACH}"
    lengths = f"--prompt_tokens {PROMPT_TOKENS} --max_len {PROMPT_TOKENS + 2 * size.tokens}"
    arguments = [*COMMAND.split(), *nodes.split(), *batch.split(), *lengths.split()]
    arguments += ["--max_new_tokens", str(2 * size.tokens), "--train_batch_size", str(max(1, samples // 16)), *more]
    read: list[Any] = []
    typer_command("grpo", planned_class("grpo"), read.append).main(arguments, standalone_mode=False)
    return read[0]


def plan_of(config: Any) -> Plan:
    """Return the plan of the command on its GPUs."""
    return make_plan(config, config.plan, hardware_of(config.plan), has_critic=False)


def make_tokenizer(folder: Path) -> None:
    """Train and save a byte-level BPE tokenizer on word problems."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(solutions(2000), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def solutions(count: int) -> list[str]:
    """Return worked answers to word problems, the text of all responses."""
    rng = np.random.default_rng(0)
    return [word_problem(random.Random(int(seed)))["answer"] for seed in rng.integers(0, 1 << 30, count)]


class _Engine:
    """Stands in for an engine: responses have random lengths, and a token takes `token_seconds`.

    A call returns those of an `interval` in seconds at once, without waiting.
    """

    def __init__(
        self, stream: np.ndarray, decode: Callable[..., str], *, mean_tokens: int, token_seconds: float, interval: float
    ) -> None:
        self.engine, self._decode = self, decode
        self._stream, self._mean_tokens = stream, mean_tokens
        self._logprobs = np.random.default_rng(0).uniform(-1, 0, stream.size).astype(np.float32)
        self._token_seconds, self._interval = token_seconds, interval
        self._lengths: list[tuple[int, int]] = []  # (length, request), the shortest last

    def begin(self, batch: int, requests: list[GenerationRequest], sampling: object, max_tokens: object) -> Arrivals:
        rngs = [np.random.default_rng(request.seed) for request in requests]
        self._lengths = [(int(rng.integers(1, 2 * self._mean_tokens)), place) for place, rng in enumerate(rngs)]
        self._lengths.sort(reverse=True)
        return self.collect(batch, 0)

    def collect(self, batch: int, count: int) -> Arrivals:
        end = self._lengths[-1][0] * self._token_seconds + self._interval
        responses = []
        while self._lengths and self._lengths[-1][0] * self._token_seconds <= end:
            length, place = self._lengths.pop()
            responses.append((place, self._response(length, place)))
        return Arrivals(responses, not self._lengths)

    def _response(self, length: int, place: int) -> Generation:
        start = 997 * place % (self._stream.size - length)
        tokens, logprobs = self._stream[start : start + length], self._logprobs[start : start + length]
        return decoded(Generation(tokens.tolist(), logprobs.tolist(), "stop", 0), self._decode)

    def sleep(self, level: int) -> None:
        pass

    def wake(self, tags: list[str]) -> None:
        pass

    def check_alive(self) -> None:
        pass


class _Rank:
    """Stands in for a rank of actor and reference."""

    def wake(self) -> None:
        pass

    sleep = sleep_optimizer = discard_push = wake

    def connect_engines(self, link: object) -> None:
        pass

    def push_weights(self, version: int) -> PushReport:
        return PushReport(version, 0, 0.0, 0, 0)

    def logprobs(self, micro_batches: list[list[Any]]) -> list[np.ndarray]:
        return [np.full(sum(one.num_trained for one in members), -0.5, np.float32) for members in micro_batches]

    def update(self, work: RankWork, on_policy: bool, weights: object, *, watch: None) -> list[dict[str, float]]:
        moments = dict.fromkeys((f"moment/{name}_mean" for name in ("x", "y", "xx", "yy", "xy")), 0.5)
        return [{"policy_loss": 0.0, "entropy": 0.1, "kl": 0.01, **moments} for _ in work.totals]


@ray.remote(num_cpus=0, enable_task_events=False)
class _Others:
    """Stands in for all engines and ranks, and counts the bytes of their calls."""

    def __init__(self, folder: Path, size: Size, generate_seconds: float) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokens = np.concatenate([tokenizer(text)["input_ids"] for text in solutions(2000)]).astype(np.int32)
        decode = partial(text_of, tokenizer, skip_special_tokens=True)
        stream = np.tile(tokens, -(-STREAM_TOKENS // tokens.size))
        times = {"token_seconds": generate_seconds / (2 * size.tokens), "interval": COLLECT_SECONDS * size.gpus}
        self._engines = [_Engine(stream, decode, mean_tokens=size.tokens, **times) for _ in range(size.gpus)]
        self._rank = _Rank()
        self._bytes = {"received": 0, "sent": 0, "stored": 0, "calls": 0}

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def call(self, number: int | None, function: Callable[..., object], *args: object) -> object:
        """Run a call on an engine, or on a rank if `number` is None. Sizes are those that the driver sees."""
        result = function(self._rank if number is None else self._engines[number], *args)
        # Arrays are read from the store, and counted where they are put.
        self._count("sent", [function, *(one for one in args if not isinstance(one, np.ndarray))])
        self._count("received", [_without_references(result)])
        self._bytes["stored"] += _stored_bytes(result)
        self._bytes["calls"] += 1
        return result

    def _count(self, name: str, values: list[object]) -> None:
        sizes = [len(ray.cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)) for value in values]
        self._bytes[name] += sum(sizes)
        self._bytes["stored"] += sum(size for size in sizes if size > INLINE_BYTES)

    def take_bytes(self) -> dict[str, int]:
        """Return the counts since the last call."""
        found, self._bytes = self._bytes, dict.fromkeys(self._bytes, 0)
        return found


def _without_references(result: Any) -> Any:
    """Return the result without references to stored arrays: pickled outside of a call, they would never be freed."""
    is_stored = isinstance(result, tuple) and isinstance(result[0], ray.ObjectRef)
    return result[1:] if is_stored else result


def _stored_bytes(result: Any) -> int:
    """Return the bytes of the float32 arrays that a rank has stored."""
    is_stored = isinstance(result, tuple) and isinstance(result[0], ray.ObjectRef)
    return 4 * sum(result[1]) if is_stored else 0


class _Puts:
    """Puts objects into Ray's object store, and counts their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, stored: Any) -> object:
        self.bytes += stored.nbytes
        return ray.put(stored)


@dataclass(frozen=True)
class _Method:
    method: Any
    number: int | None

    def remote(self, *args: object) -> object:
        return self.method.remote(self.number, *args)


@dataclass(frozen=True)
class _Worker:
    """The handle of an engine, or of a rank if `number` is None."""

    others: Any
    number: int | None = None

    @property
    def call(self) -> _Method:
        return _Method(self.others.call, self.number)

    @property
    def address(self) -> Any:
        return self.others.address


class _Watched:
    """The tracker of the loop, which books CPU time of this process by phase."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.log, self.samples, self.message = tracker.log, tracker.samples, tracker.message
        self.seconds: dict[str, float] = {}
        self._name, self._since = "rest", time.process_time()

    def phase(self, name: str | None) -> None:
        now = time.process_time()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name or "rest", now


def _roles(size: Size, others: Any, puts: _Puts, max_tokens: int) -> Callable[..., Roles[ActorRole]]:
    """Return a function that adds the scorer to the program's handles of actor, reference and engines."""
    config = config_of(size, "--train_max_tokens_per_gpu", str(max_tokens))
    group = WorkerGroup[Any]("actor", [_Worker(others)] * size.gpus, FOLDER)
    planner = MicroBatchPlanner(size.gpus, config.batch, 1e-5, lambda: True)
    actor = ActorRole(group, planner, takes_turns=True)
    reference = FrozenPolicyRole(group, planner, takes_turns=True)
    ready = ray.put(None)
    engines = EngineGroup(
        lambda number: (_Worker(others, number), ready),
        num_engines=size.gpus,
        settings=EngineSettings(max_model_len=config.prompts.max_len, enable_sleep=True, sync_backend="ipc"),
    )
    engines.connect(actor)
    return partial(
        Roles,
        actor=actor,
        engines=engines,
        frozen_policies={"ref": reference},
        store=partial(store, put=puts),
        store_column=partial(store_arrays, put=puts),
        by_sample=group.by_sample,
    )


def _run(roles: Callable[..., Roles[ActorRole]], config: Any, *, folder: Path) -> dict[str, float]:
    """Run one iteration and return the driver's CPU seconds by phase."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    settings = OnlineSettings.of(config, ESTIMATORS[config.estimator])
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        console = Console(file=stack.enter_context((output / "log").open("w")))
        scorer = stack.enter_context(Scorer(config.reward))
        tracker = Tracker(config.tracking, output, command="grpo", total_steps=1, console=console, resume_step=None)
        watched = _Watched(stack.enter_context(tracker))
        prompts = _prompts(config.rollout.rollout_batch_size)
        decode = partial(text_of, tokenizer, skip_special_tokens=True)
        started = roles(scorer=scorer)
        train_online(
            started,
            RolloutSource(started.engines, scorer, settings, prompts, decode, tell=print),
            state=first_state(config.policy),
            total_iterations=1,
            save_steps=-1,
            hooks=OnlineHooks(watched, lambda state: None, lambda: False),
        )
        watched.phase(None)
    return watched.seconds


def _prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, (count, PROMPT_TOKENS)).tolist()
    return [Prompt(ids[i], "A question. " * 80, str(i), "prompts.jsonl", i) for i in range(count)]


def measure(size: Size, folder: Path, profile: Path | None) -> dict[str, Any]:
    """Run an iteration of a size in this process, after a small one that warms up. Return its costs."""
    config = config_of(size)
    plan = plan_of(config)
    with ExitStack() as stack:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=4 << 30, logging_level="error")
        stack.callback(ray.shutdown)
        others = _Others.remote(  # type: ignore[attr-defined]
            folder, size, plan.times["generate"].seconds
        )
        puts = _Puts()
        run = partial(_run, _roles(size, others, puts, plan.batching.max_tokens), folder=folder)
        run(config_of(replace(size, prompts=2)))
        puts.bytes = 0
        ray.get(others.take_bytes.remote())
        resume_collector(SELDOM)  # as in runs
        profiler = cProfile.Profile()
        if profile is not None:
            profiler.enable()
        seconds = run(config)
        profiler.disable()
        found = ray.get(others.take_bytes.remote())
        found |= {name: found[name] + puts.bytes for name in ("sent", "stored")}
    if profile is not None:
        profiler.dump_stats(profile)
    return {"seconds": seconds, **found, "peak": peak_memory(os.getpid()), "planned": plan.seconds}


def _row(size: Size, found: dict[str, Any]) -> list[object]:
    seconds = sum(found["seconds"].values())
    times = [
        text
        for one in (seconds, seconds - found["seconds"]["generate"])
        for text in (f"{one:.1f}", f"{100 * one / found['planned']:.1f} %")
    ]
    sizes = [f"{found[name] / MIB:,.0f}" for name in ("received", "sent", "stored")]
    samples = size.prompts * SAMPLES_EACH
    return [size.gpus, samples, size.tokens, *times, found["calls"], *sizes, f"{found['peak']:,.0f}"]


def parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    found = make_parser(__doc__)
    found.add_argument("--sizes", nargs="+", default=SIZES, help="GPUS:PROMPTS:TOKENS")
    found.add_argument("--profile", type=Path, help="file for cProfile's statistics of the only size")
    found.add_argument("--folder", type=Path, default=FOLDER / "scaling")
    found.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return found


def main() -> None:
    args = parser().parse_args()
    tokenizer = args.folder / "tokenizer"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    if args.here or args.profile:
        print(json.dumps(measure(Size.of(args.sizes[0]), tokenizer, args.profile)))
        return
    rows = []
    for text in args.sizes:
        words = [sys.executable, __file__, "--here", "--folder", str(args.folder), "--sizes", text]
        output = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append(_row(Size.of(text), json.loads(output.splitlines()[-1])))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(HEAD, rows))
    print(machine())


if __name__ == "__main__":
    main()
