"""Peak memory and time of token log-probabilities, all logits at once against chunks, forward and backward.

    .venv/bin/python benchmarks/logprob_memory.py
    .venv/bin/python benchmarks/logprob_memory.py --tokens 16384 --vocabulary 151936 --hidden 2048

Each figure comes from a process of its own: on a CPU from the kernel's count of the largest resident size, before and
after; on CUDA from the allocator's peak. The dense run is left out where its logits would not fit.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from rlhf_cli.models.logprobs import token_logprobs

KINDS = ("dense", "chunked")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def dense_logprobs(hidden_KD: torch.Tensor, weight_VD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """Log-probabilities as one would write them down."""
    log_p = torch.log_softmax((hidden_KD @ weight_VD.T).float(), -1)
    return log_p.gather(-1, targets_K[:, None]).squeeze(-1)


class PeakMemory:
    """The largest growth in bytes since the start, on the device of a tensor."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            _forget_peak()
        self._start = torch.cuda.memory_allocated() if device == "cuda" else _resident("VmRSS")

    def read(self) -> int:
        """The peak so far."""
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        return peak - self._start


def _forget_peak() -> None:
    """Let the kernel count the largest resident size from here on; without the right to it counts from the start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Peak of one forward and backward pass in bytes, and the seconds of a second one."""
    device, dtype = options.device, DTYPES[options.dtype]
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden, dtype=dtype, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), device=device)
    # Loads the libraries of the first backward pass and matrix products, so that they are not counted.
    token_logprobs(hidden[:2], weight[:64], targets[:2] % 64)[0].sum().backward()
    hidden.grad = weight.grad = None

    def run() -> float:
        logprobs = (
            dense_logprobs(hidden, weight, targets) if kind == "dense" else token_logprobs(hidden, weight, targets)[0]
        )
        logprobs.mean().backward()
        return logprobs.detach().double().mean().item()

    peak = PeakMemory(device)
    mean = run()
    peak_bytes = peak.read()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return {"peak_bytes": peak_bytes, "seconds": time.perf_counter() - start, "mean_logprob": mean}


def in_child(kind: str) -> dict[str, float] | None:
    """The measurement in a fresh process; None if it ran out of memory."""
    done = subprocess.run([sys.executable, *sys.argv, "--kind", kind], stdout=subprocess.PIPE, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def report(options: argparse.Namespace) -> None:
    logits = options.tokens * options.vocabulary * 4
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden size {options.hidden}, {options.dtype} on "
        f"{options.device}; one float32 tensor of all logits is {logits / 2**20:,.0f} MiB"
    )
    print(f"{'':8} {'peak MiB':>10} {'seconds':>9} {'mean log-prob':>14}")
    for kind in KINDS:
        result = in_child(kind)
        if result is None:
            print(f"{kind:8} {'did not fit':>10}")
            continue
        print(
            f"{kind:8} {result['peak_bytes'] / 2**20:>10,.0f} {result['seconds']:>9.3f} {result['mean_logprob']:>14.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind, options)))
    else:
        report(options)


if __name__ == "__main__":
    main()
