"""Tokens/s and peak memory of two ranks with a long sequence each, and of two ranks that share each sequence.

    python benchmarks/sequence_parallel.py [--lengths 2048 4096 8192 16384 32768] [--modes ulysses gather]

Each line comes from two fresh processes with one thread each, over gloo: a forward and a backward pass of a randomly
initialised model in float32 with gradient checkpointing. Peak memory is the growth of a rank's largest resident size
meanwhile, over its size with the model and its gradients. The share of communication is the time that rank 0 spends in
the exchanges between ranks, which includes waiting for the other one. Gradients are not reduced over ranks, as that is
the same for all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from logprob_memory import PeakMemory
from setting import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.policy import PolicyModel
from rlhf_cli.models.sequence_parallel.shards import Mode, SequenceRanks

NUM_RANKS = 2
ALONE = "alone"
MODES = [mode for mode in get_args(Mode) if mode != "ring"]  # which needs a GPU
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor")
WARM_UP_TOKENS = 64
MIB = 2**20


@dataclass(frozen=True)
class Figures:
    """The bytes, the seconds, and the seconds of communication of a pass over one sequence a rank, or one of both."""

    peak_bytes: int
    seconds: float
    communication: float

    def rate(self, length: int, num_sequences: int) -> float:
        """Return tokens/s of both ranks."""
        return length * num_sequences / self.seconds


class Stopwatch:
    """The seconds spent in the exchanges between ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in COLLECTIVES:
            setattr(dist, name, self._timed(getattr(dist, name)))

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return collective(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def make_module(mode: str, length: int) -> PolicyModel:
    """A policy whose ranks share sequences in this mode, or compute alone."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=length,
        attn_implementation=VARLEN,
    )
    model = Qwen2ForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    group = distributed.sequence_group(NUM_RANKS)
    assert group is not None
    return PolicyModel(model, None if mode == ALONE else SequenceRanks(group, mode))  # type: ignore[arg-type]


def run(module: PolicyModel, num_tokens: int) -> None:
    """A forward and a backward pass over one sequence: of this rank's own if it computes alone."""
    rng = np.random.default_rng(dist.get_rank() if module.sequence_ranks is None else 0)
    token_ids = rng.integers(0, module.model.config.vocab_size, num_tokens).astype(np.int32)
    module(pack([TokenSequence(token_ids, np.arange(num_tokens) > 0)]))[0].mean().backward()


def measure(mode: str, length: int) -> Figures:
    """Return the figures of this rank."""
    distributed.join_process_group()
    module = make_module(mode, length)
    run(module, WARM_UP_TOKENS)  # loads kernels and makes gradients, so that they are not counted
    watch = Stopwatch()
    distributed.barrier()
    peak, start = PeakMemory("cpu"), time.perf_counter()
    run(module, length)
    distributed.barrier()
    found = Figures(peak.read(), time.perf_counter() - start, watch.seconds)
    distributed.leave_process_group()
    return found


def in_children(mode: str, length: int) -> Figures:
    """Return the figures of rank 0 in fresh processes; the peak is the larger one of both ranks.

    Ends the benchmark with what a rank printed if it fails.
    """
    port, words = str(free_port()), [sys.executable, __file__, "--mode", mode, "--lengths", str(length)]
    ranks = []
    for rank in range(NUM_RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_SIZE": NUM_RANKS}
        environment = os.environ | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(words, env=environment, **pipes))  # type: ignore[call-overload]
    try:
        printed = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, printed, strict=True):
        if rank.returncode != 0:
            sys.exit(f"{mode}, {length} tokens: a rank ended with status {rank.returncode}:\n{errors[-3000:]}")
    first, second = (Figures(**json.loads(output.splitlines()[-1])) for output, _ in printed)
    return Figures(max(first.peak_bytes, second.peak_bytes), first.seconds, first.communication)


HEAD = (
    "| tokens a sequence | ranks | tokens/s | to alone | peak memory of a rank, MiB | alone to it | communication |\n"
    "|---|---|---|---|---|---|---|"
)


def line(length: int, mode: str, found: Figures, alone: Figures) -> str:
    """A line of the table; ranks alone compute a sequence each, ranks that share compute one together."""
    rate = found.rate(length, NUM_RANKS if mode == ALONE else 1)
    return (
        f"| {length:,} | {mode} | {rate:,.0f} | {rate / alone.rate(length, NUM_RANKS):.2f} | "
        f"{found.peak_bytes / MIB:,.0f} | {alone.peak_bytes / found.peak_bytes:.2f} | "
        f"{found.communication / found.seconds:.1%} |"
    )


def report(lengths: Sequence[int], modes: Sequence[str]) -> None:
    """Print a table, each line as soon as it is measured."""
    print(machine())
    print(HEAD)
    for length in lengths:
        alone = in_children(ALONE, length)
        print(line(length, ALONE, alone, alone), flush=True)
        for mode in modes:
            print(line(length, mode, in_children(mode, length), alone), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(asdict(measure(options.mode, options.lengths[0]))))
    else:
        report(options.lengths, options.modes)


if __name__ == "__main__":
    main()
