"""Measure convolutions and recurrent layers in packs on a CPU, forward and backward.

    python benchmarks/hybrid.py [lfm2 qwen3_5_text granitemoehybrid ...] [--lengths 1024 2048 4096]

Prints CPU seconds and the growth of memory for one sequence by length, and for eight responses to a prompt of 300
tokens, computed once or repeated. Models are random, with four layers of width 128. Exits with 1 if twice the length
takes more than 2.5 times as long or as much memory. One thread; needs an idle core.
"""

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import torch
from common import machine, make_parser, table
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack
from rlhf_cli.data.packing.shared_prompts import pack_groups
from rlhf_cli.models.attention.varlen import VARLEN
from rlhf_cli.models.policy import PolicyModel

LIMIT = 2.5
VOCABULARY = 512
RESPONSES = (40, 55, 80, 120, 130, 200, 250, 300)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 256,
}
"""Sizes by configuration name, where a type has it."""
RECURRENT = {"lfm2": "conv", "lfm2_moe": "conv"}
"""Name of a recurrent layer in `layer_types`, by type; linear_attention otherwise."""


def make_model(kind: str) -> PolicyModel:
    layers = [RECURRENT.get(kind, "linear_attention")] * 3 + ["full_attention"]
    known = AutoConfig.for_model(kind).to_dict()
    sizes = {name: value for name, value in SHAPE.items() if name in known}
    config = AutoConfig.for_model(kind, **sizes, layer_types=layers)
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN).train())


def sequence(length: int, prompt: np.ndarray | None = None) -> TokenSequence:
    generator = np.random.default_rng(length)
    start = generator.integers(3, VOCABULARY, 1) if prompt is None else prompt
    token_ids = np.concatenate([start, generator.integers(3, VOCABULARY, length)]).astype(np.int32)
    return TokenSequence(token_ids, np.arange(token_ids.size) >= start.size)


def measure(kind: str, made: Pack) -> tuple[float, float]:
    """Return the CPU seconds of forward and backward, the best of two, and by how many MiB they raise peak memory."""
    policy = make_model(kind)
    before = peak_mib()
    times = []
    for _ in range(2):
        start = time.process_time()
        policy(made)[0].sum().backward()
        times.append(time.process_time() - start)
    return min(times), peak_mib() - before


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_new_process(kind: str, made: Pack) -> tuple[float, float]:
    """Measure in a process of its own: memory that an earlier pack has left would hide the growth."""
    with ProcessPoolExecutor(1, get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)) as process:
        return process.submit(measure, kind, made).result()


def grouped(way: Callable[[list[TokenSequence]], Pack]) -> Pack:
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, 300)
    return way([sequence(length, prompt) for length in RESPONSES])


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("kinds", nargs="*", default=["lfm2", "qwen3_5_text", "granitemoehybrid"], metavar="KIND")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    packs = [pack([sequence(length)]) for length in args.lengths] + [grouped(pack_groups), grouped(pack)]
    rows, is_linear = [], True
    for kind in args.kinds:
        found = [in_new_process(kind, made) for made in packs]
        rows.append([kind, *(f"{seconds:.2f} s, {mib:,.0f} MiB" for seconds, mib in found)])
        for (short, before), (long, after) in pairwise(zip(args.lengths, found, strict=False)):
            is_linear &= all(new / old <= LIMIT * long / (2 * short) for old, new in zip(before, after, strict=True))
    lengths = " | ".join(f"{length:,} tokens" for length in args.lengths)
    print(table(f"CPU time, memory | {lengths} | shared prompt | repeated", rows))
    return 0 if is_linear else 1


if __name__ == "__main__":
    sys.exit(main())
