"""Time of GAE over a million tokens, vectorised and as a loop over tokens.

    python benchmarks/advantages_speed.py [--tokens 1000000] [--threads N]

The budget is 50 ms for a million tokens, whatever the lengths of the responses.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from rlhf_cli.algorithms.advantages import gae

MEAN_LENGTHS = (20, 200, 2_000, 20_000)


def make_batch(num_tokens: int, mean_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values and segment bounds; lengths are exponential, roughly as in sampled responses."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(2 * num_tokens // mean_length + 100, generator=generator)
    ends = torch.cumsum((-draws.log() * mean_length).long() + 1, 0)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < num_tokens], torch.tensor([num_tokens])])
    rewards_N, values_N = torch.randn(2, num_tokens, generator=generator)
    return rewards_N, values_N, cu


def gae_loop(rewards: list[float], values: list[float], cu: list[int], gamma: float, lambd: float) -> list[float]:
    """The definition, one token at a time."""
    advantages = [0.0] * len(rewards)
    for start, end in pairwise(cu):
        next_value, next_advantage = 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            next_advantage = rewards[t] + gamma * next_value - values[t] + gamma * lambd * next_advantage
            next_value, advantages[t] = values[t], next_advantage
    return advantages


def best_time(run: Callable[[], object], repeats: int) -> float:
    """Shortest wall time of `run` in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1_000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.tokens} tokens, {args.threads} threads, gamma 0.99, lambda 0.95, float32 in and out")
    for mean_length in MEAN_LENGTHS:
        rewards_N, values_N, cu = make_batch(args.tokens, mean_length)
        fast = best_time(partial(gae, rewards_N, values_N, cu, gamma=0.99, lambd=0.95), 10)
        lists = rewards_N.tolist(), values_N.tolist(), cu.tolist()
        slow = best_time(partial(gae_loop, *lists, 0.99, 0.95), 1)
        print(f"{len(cu) - 1:7d} responses of {mean_length:6d} tokens: {fast:7.1f} ms; loop {slow:7.0f} ms")


if __name__ == "__main__":
    main()
