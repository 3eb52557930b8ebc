"""Times episodes whose tool takes a random time beside the same turns without a tool.

    python benchmarks/episode_latency.py                          64 episodes of 4 turns, a tool of 0 to 80 ms
    python benchmarks/episode_latency.py --runs 7 --num_workers 64

A tiny random Qwen2 on a vLLM engine behind Ray, an environment file in its processes, and the turns of each schedule
(`--turn_schedule`). The measure is the generation time of the same tokens: the turns that the step schedule asked for,
as 4 batches in which the engine has nothing else to wait for. Schedules and this measure take turns in one process.
Exits with 1 if a schedule takes longer than its aim.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from setting import machine
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.backends.cluster.ray_cluster import ray_cluster
from rlhf_cli.backends.roles.worker import AsyncRayWorker
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import HOST_ENGINE
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.data.formats.conversations import Message, plain_message
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.models.scratch import train_tokenizer
from rlhf_cli.trainers.online.episodes import EpisodeEngines, EpisodeLimits

AIMS = {"step": 1.6, "free": 1.3}
"""Seconds of a schedule for each second of generation."""
NUM_TURNS = 4
MAX_LEN = 2048
VOCABULARY = 320
ENVIRONMENT = f"""
import random, time

class Environment:
    def reset(self, number, **row):
        self.random, self.turn = random.Random(number), 0

    def step(self, text):
        time.sleep(self.random.uniform(0, {{seconds}}))
        self.turn += 1
        return f"result {{{{self.turn}}}}", 0.0, self.turn == {NUM_TURNS}
"""


def save_model(path: Path, *, hidden: int, layers: int, turn_tokens: int) -> PreTrainedTokenizerBase:
    """A random Qwen2 with heads of 32, and its tokenizer, which is returned.

    It draws its tokens almost evenly, so that as many of them have to end a turn as give turns of that mean length.
    """
    tokenizer = train_tokenizer(["result of the tool in the turn"], vocab_size=VOCABULARY)
    torch.manual_seed(0)
    ends = [*range(100, 99 + max(1, VOCABULARY // turn_tokens)), tokenizer.eos_token_id]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        eos_token_id=ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer


def make_engines(path: Path, logs: Path, *, num_threads: int) -> EngineGroup:
    """One vLLM engine in a Ray actor, ready to generate."""
    import ray

    settings = EngineSettings(max_model_len=MAX_LEN, dtype="fp32", enforce_eager=True, num_threads=num_threads)

    def start(number: int) -> tuple[Any, object]:
        worker: Any = ray.remote(AsyncRayWorker).remote(environment={}, log_file=logs / f"engine-{number}.log")
        return worker, worker.build.remote({}, HOST_ENGINE, "vllm", str(path), settings)

    engines = EngineGroup(start, num_engines=1, takes_turns=False, sync_backend="shm", ranks_per_engine=1)
    engines.wait_until_built()
    return engines


@dataclass
class Recorded:
    """Engines that keep the batches which they were asked for."""

    engines: EngineGroup
    batches: list[tuple[list[GenerationRequest], SamplingParams]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engines, name)

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        """Start a batch."""
        self.batches.append((requests, sampling))
        self.engines.begin(requests, sampling)


@dataclass(frozen=True)
class Bench:
    """The engines, environments and prompts of all runs."""

    engines: EngineGroup
    environments: FileEnvironments
    dialogue: ChatDialogue
    requests: list[GenerationRequest]
    sampling: SamplingParams

    def play(self, engines: Any, *, in_step: bool) -> list[Generation]:
        """All episodes."""
        limits = EpisodeLimits(NUM_TURNS, MAX_LEN)
        episodes = EpisodeEngines(engines, self.environments, self.dialogue, limits, in_step=in_step)
        return episodes.generate(self.requests, self.sampling)

    def turns(self) -> list[tuple[list[GenerationRequest], SamplingParams]]:
        """The batches of the step schedule."""
        recorded = Recorded(self.engines)
        self.play(recorded, in_step=True)
        return recorded.batches

    def generate(self, batches: Sequence[tuple[list[GenerationRequest], SamplingParams]]) -> int:
        """Generate the turns as plain batches; the number of their tokens."""
        return sum(len(one.token_ids) for batch in batches for one in self.engines.generate(*batch))


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """What each schedule took for a second of generation, round by round."""
    return {
        name: [taken / plain for taken, plain in zip(seconds[name], seconds["tokens alone"], strict=True)]
        for name in AIMS
    }


def make_requests(tokenizer: PreTrainedTokenizerBase, count: int) -> list[GenerationRequest]:
    """A request for each episode."""
    found = []
    for number in range(count):
        message = Message("user", f"task {number}")
        asked = [{"role": message.role, "content": message.content}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        row = json.dumps({"prompt": "", "columns": {"number": number}, "messages": [plain_message(message)]})
        found.append(GenerationRequest(list(ids), seed=number, row=row))
    return found


def measure(bench: Bench, runs: int) -> dict[str, list[float]]:
    """Seconds of each schedule and of the tokens alone, in turns; prints the size of the work."""
    batches = bench.turns()  # warms up too
    num_tokens = bench.generate(batches)
    free, step = (bench.play(bench.engines, in_step=in_step) for in_step in (False, True))
    same = sum(one.token_ids == other.token_ids for one, other in zip(free, step, strict=True))
    print(f"{len(step)} episodes, {num_tokens:,} tokens in {len(batches)} turns; {same} the same in both schedules")
    seconds: dict[str, list[float]] = {name: [] for name in ("tokens alone", *AIMS)}
    for _ in range(runs):
        seconds["tokens alone"].append(timed(partial(bench.generate, batches)))
        for name in AIMS:
            seconds[name].append(timed(partial(bench.play, bench.engines, in_step=name == "step")))
    return seconds


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--latency_ms", type=float, default=80.0, help="the longest that a tool takes")
    parser.add_argument("--num_workers", type=int, default=32, help="environments that work at the same time")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--turn_tokens", type=int, default=32, help="tokens of a turn on average")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the engine, which leaves the other cores to the rest"
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    with TemporaryDirectory() as folder, ray_cluster():
        path = Path(folder)
        tokenizer = save_model(path / "model", hidden=args.hidden, layers=args.layers, turn_tokens=args.turn_tokens)
        source = path / "tool.py"
        source.write_text(ENVIRONMENT.format(seconds=args.latency_ms / 1000))
        prompts = PromptConfig(prompt_data="none", max_len=MAX_LEN)
        template = Renderer(prompts, tokenizer).template
        ends = Qwen2Config.from_pretrained(path / "model").eos_token_id
        dialogue = ChatDialogue(template, tokenizer, (), end_ids=ends, vocab_size=VOCABULARY)
        engines = make_engines(path / "model", path, num_threads=args.threads)
        try:
            with FileEnvironments(str(source), timeout=30.0, num_workers=args.num_workers) as environments:
                requests = make_requests(tokenizer, args.episodes)
                bench = Bench(engines, environments, dialogue, requests, SamplingParams(256))
                seconds = measure(bench, args.runs)
        finally:
            engines.shutdown()
    found = ratios(seconds)
    print(f"{machine()}; tool of 0 to {args.latency_ms:g} ms, {args.num_workers} at a time\n")
    print("| schedule | seconds, median | ratio to the tokens alone, median | least and most | aim |")
    print("|---|---|---|---|---|")
    for name, taken in seconds.items():
        of_name = found.get(name, [1.0])
        print(
            f"| {name} | {statistics.median(taken):.3f} | {statistics.median(of_name):.2f} "
            f"| {min(of_name):.2f} to {max(of_name):.2f} | {AIMS.get(name, '')} |"
        )
    return int(any(statistics.median(found[name]) > aim for name, aim in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
