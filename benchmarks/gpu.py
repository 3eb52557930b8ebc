"""Speed and memory of the parts on one NVIDIA GPU.

    python benchmarks/gpu.py [--shape 1.5b] [--parts packing logits training rollout] [--peak_tflops 989]

packing    forward and backward over the same sequences, packed and padded
logits     log-probabilities in chunks against the whole matrix of logits: time and peak memory
training   whole DeepSpeed steps: tokens/s, share of the GPU's peak (MFU), sleep and wake of the trainer
rollout    vLLM, if it is installed: tokens/s, sleep and wake of the engine, push of weights by ipc

Random weights in the shape of Qwen2.5's models, so that nothing is downloaded. Needs torch, transformers and
DeepSpeed. Ends with 2 if no GPU is visible.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from gpu_training import SHAPES, Row, Scale, logits, packing, training
from setting import versions

PARTS = ("packing", "logits", "training", "rollout")
PEAK_TFLOPS = (
    ("H200", 989),
    ("H100 PCIe", 756),
    ("H100", 989),
    ("GH200", 989),
    ("B200", 2250),
    ("A100", 312),
    ("L40S", 362),
    ("L4", 121),
    ("RTX 4090", 165),
)
"""Dense bfloat16 with float32 sums, from the makers' data sheets; the first name that fits counts."""


def peak_tflops(name: str) -> float | None:
    """Return the peak of the GPU of this name, None if it is not listed."""
    return next((float(peak) for part, peak in PEAK_TFLOPS if part in name), None)


def rows_of(parts: Sequence[str], scale: Scale, peak: float | None) -> Iterator[Row]:
    """Everything that was asked for, part by part."""
    if "packing" in parts:
        yield from packing(scale)
    if "logits" in parts:
        yield from logits(scale)
    if "training" in parts:
        yield from training(scale, peak)
    if "rollout" in parts and importlib.util.find_spec("vllm") is not None:
        from gpu_rollout import rollout

        yield from rollout(scale)
    elif "rollout" in parts:
        yield Row("rollout", "not measured: vLLM is not installed", {})


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| part | setting | figures |", "|---|---|---|"]
    for row in rows:
        figures = ", ".join(f"{_rounded(value)} {unit}" for unit, value in row.figures.items())
        lines.append(f"| {row.part} | {row.setting} | {figures} |")
    return "\n".join(lines)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=SHAPES, default="1.5b")
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--sequences", type=int, default=128, help="in one step")
    found.add_argument("--max_tokens", type=int, default=16_384, help="in one micro-batch")
    found.add_argument("--peak_tflops", type=float, help="of the GPU in bfloat16, where it is not known here")
    return found


def main() -> int:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        print("No NVIDIA GPU is visible to PyTorch here, so there is nothing to measure.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    scale = Scale(args.shape, device, num_sequences=args.sequences, max_tokens=args.max_tokens)
    print(f"{name}, CUDA {torch.version.cuda}; {versions()}\n{args.shape} shape, {args.max_tokens} tokens in a pack\n")
    rows = []
    for row in rows_of(args.parts, scale, args.peak_tflops or peak_tflops(name)):
        print(table([row]).splitlines()[-1], flush=True)
        rows.append(row)
    print(f"\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
