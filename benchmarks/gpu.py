"""Measure speed and memory of single components on one NVIDIA GPU.

    python benchmarks/gpu.py [--shape 1.5b] [--parts packing logits training rollout] [--peak_tflops 989]

packing    forward and backward passes over the same sequences, packed and padded
logits     log-probs with chunks and with full logits: time and peak memory
training   DeepSpeed steps: tokens/s, model FLOPs utilisation (MFU), sleep and wake of the trainer
rollout    vLLM, if installed: tokens/s, sleep and wake of the engine, weight update over ipc

Uses random weights with Qwen2.5 shapes, without downloads. Exits with 2 if no GPU is visible. Several engines
and nccl need more than one GPU and are not measured.
"""

import argparse
import gc
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import make_parser, table, versions
from torch import nn
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.data.packing.packs import Pack, TokenSequence, pack, plan_packs
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.models.attention.table import resolve_attention
from rlhf_cli.models.logprobs import token_logprobs
from rlhf_cli.models.policy import PolicyModel

GIB = 2**30
PARTS = ("packing", "logits", "training", "rollout")
PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "B200": 2250, "A100": 312}
PEAK_TFLOPS |= {"L40S": 362, "L4": 121, "RTX 4090": 165}
"""Dense bfloat16 TFLOPS with float32 accumulation, from data sheets; the first matching name is used."""
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = (256, 1024), 64, 512
MEMORY_SHARE = 0.5
"""Fraction of GPU memory for the engine."""
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip((*SHAPE, "vocab_size", "tie_word_embeddings"), values, strict=True))
    for name, values in {
        "tiny": (64, 128, 2, 4, 2, 512, True),
        "0.5b": (896, 4864, 24, 14, 2, 151_936, True),
        "1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
        "7b": (3584, 18_944, 28, 28, 4, 151_936, False),
    }.items()
}
"""Shapes from Qwen2.5, and a tiny one to test the benchmark."""


@dataclass(frozen=True)
class Scale:
    """Size of the measurements."""

    shape: str
    device: torch.device
    num_sequences: int = 128
    max_tokens: int = 16_384
    max_length: int = 2048
    repeats: int = 3

    @property
    def config(self) -> Qwen2Config:
        """Return the model config."""
        return Qwen2Config(**SHAPES[self.shape], max_position_embeddings=self.max_length)


@dataclass(frozen=True)
class Row:
    """One result line: a setting and its values by unit."""

    part: str
    setting: str
    figures: dict[str, float]


def make_sequences(scale: Scale, *, seed: int = 0) -> list[TokenSequence]:
    """Return random sequences with log-normal length (median 256), of which the last two thirds are trained."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(256), 0.9, scale.num_sequences), 16, scale.max_length).astype(int)
    vocabulary = SHAPES[scale.shape]["vocab_size"]
    return [
        TokenSequence(rng.integers(0, vocabulary, length).astype(np.int32), np.arange(length) >= length // 3)
        for length in lengths
    ]


def make_model(scale: Scale, attention: str) -> Qwen2ForCausalLM:
    """Return a model with random bfloat16 weights on the device, in training mode."""
    torch.manual_seed(0)
    config = scale.config
    config._attn_implementation = attention
    with scale.device:
        return Qwen2ForCausalLM(config).to(torch.bfloat16).train()


def make_packs(scale: Scale, sequences: Sequence[TokenSequence]) -> list[Pack]:
    """Return all sequences in packs within the token limit."""
    (bins,) = plan_packs([len(sequence) for sequence in sequences], max_tokens=scale.max_tokens, num_ranks=1)
    return [pack([sequences[i] for i in members]).to(scale.device) for members in bins]


def padded_batches(
    sequences: Sequence[TokenSequence], *, max_tokens: int, by_length: bool
) -> list[list[TokenSequence]]:
    """Return padded batches with at most `max_tokens`, in order or sorted by length."""
    ordered = sorted(sequences, key=len) if by_length else list(sequences)
    batches: list[list[TokenSequence]] = []
    widest = 0
    for sequence in ordered:
        widest = max(widest, len(sequence))
        if not batches or widest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            widest = len(sequence)
        batches[-1].append(sequence)
    return batches


def padded_tensors(batch: Sequence[TokenSequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Return ids, mask and labels [B, longest]; labels are -100 for untrained tokens."""
    shape = (len(batch), max(map(len, batch)))
    ids, mask, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -100)
    for row, sequence in enumerate(batch):
        length = len(sequence)
        ids[row, :length], mask[row, :length] = sequence.token_ids, 1
        labels[row, :length] = np.where(sequence.loss_mask, sequence.token_ids, -100)
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


@dataclass(frozen=True)
class Cost:
    """Time and memory of one repetition."""

    seconds: float
    peak_gib: float | None  # None if the device does not count it


def measure(run: Callable[[], object], scale: Scale) -> Cost | None:
    """Return the shortest time of several repetitions after a warm-up with peak memory, or None if out of memory."""
    try:
        _timed(run, scale.device)  # a warm-up
        if scale.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(scale.device)
        times = [_timed(run, scale.device) for _ in range(scale.repeats)]
    except torch.OutOfMemoryError:
        return None
    peak = torch.cuda.max_memory_allocated(scale.device) / GIB if scale.device.type == "cuda" else None
    return Cost(min(times), peak)


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until an action and all its work on the device are done."""
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _row(part: str, setting: str, cost: Cost | None, **figures: Callable[[Cost], float]) -> Row:
    if cost is None:
        return Row(part, f"{setting} (out of memory)", {})
    values = {name.replace("_per_", "/").replace("_", " "): figure(cost) for name, figure in figures.items()}
    return Row(part, setting, values | ({} if cost.peak_gib is None else {"peak GiB": cost.peak_gib}))


def packing(scale: Scale) -> Iterator[Row]:
    """Measure forward and backward passes over the same sequences, packed and padded, in real tokens per second."""
    sequences = make_sequences(scale)
    num_tokens = sum(map(len, sequences))
    best = resolve_attention("auto", device=scale.device.type, dtype=torch.bfloat16)
    for attention in dict.fromkeys((best, "varlen")):
        policy, packs = PolicyModel(make_model(scale, attention)), make_packs(scale, sequences)
        cost = measure(partial(_train_packed, policy, packs), scale)
        yield _row("packing", f"packed, {attention}", cost, tokens_per_s=lambda c: num_tokens / c.seconds)
        del policy
    model = make_model(scale, "sdpa")
    for by_length in (True, False):
        batches = [
            padded_tensors(batch, scale.device)
            for batch in padded_batches(sequences, max_tokens=scale.max_tokens, by_length=by_length)
        ]
        cost = measure(partial(_train_padded, model, batches), scale)
        order = "by length" if by_length else "in order"
        yield _row("packing", f"padded {order}, sdpa", cost, tokens_per_s=lambda c: num_tokens / c.seconds)


def _train_packed(policy: PolicyModel, packs: Sequence[Pack]) -> None:
    policy.zero_grad(set_to_none=True)
    for micro_batch in packs:
        logprobs_K, _ = policy(micro_batch)
        (-logprobs_K.sum()).backward()


def _train_padded(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        model(**batch, num_items_in_batch=1).loss.backward()


def logits(scale: Scale) -> Iterator[Row]:
    """Measure log-probs for a pack, forward and backward, with chunks and with full logits."""
    config = scale.config
    shape = {"device": scale.device, "dtype": torch.bfloat16}
    hidden_KD = torch.randn(scale.max_tokens, config.hidden_size, requires_grad=True, **shape)  # type: ignore[call-overload]
    weight_VD = torch.randn(config.vocab_size, config.hidden_size, **shape).mul_(0.02).requires_grad_()  # type: ignore[call-overload]
    targets_K = torch.randint(config.vocab_size, (scale.max_tokens,), device=scale.device)

    def whole() -> None:
        loss = F.cross_entropy(F.linear(hidden_KD, weight_VD).float(), targets_K, reduction="sum")
        torch.autograd.grad(loss, (hidden_KD, weight_VD))

    def chunked() -> None:
        logprobs_K, _ = token_logprobs(hidden_KD, weight_VD, targets_K)
        torch.autograd.grad(logprobs_K.sum(), (hidden_KD, weight_VD))

    for name, run in (("chunked", chunked), ("whole logits", whole)):
        setting = f"{name}, {scale.max_tokens} x {config.vocab_size}"
        yield _row("logits", setting, measure(run, scale), ms=lambda c: 1e3 * c.seconds)


def training_flops(config: Qwen2Config, lengths: Sequence[int], num_trained: int) -> float:
    """Return the forward and backward FLOPs without recomputation.

    Six per weight and token in the layers, and six per head weight and trained token. Causal attention needs 2 L^2 D
    forward and twice that backward, per layer with D query dimensions.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_size = hidden // config.num_attention_heads
    key_value = config.num_key_value_heads * head_size
    weights = layers * (2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * config.intermediate_size)
    attention = 6 * layers * hidden * sum(length**2 for length in lengths)
    return 6.0 * weights * sum(lengths) + 6.0 * hidden * config.vocab_size * num_trained + attention


def training(scale: Scale, peak_tflops: float | None) -> Iterator[Row]:
    """Measure full DeepSpeed optimizer steps, and offloading and reloading the state."""
    from rlhf_cli.algorithms.aggregation import StepTotals
    from rlhf_cli.backends.training import distributed
    from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
    from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
    from rlhf_cli.trainers.offline.loop import bind
    from rlhf_cli.trainers.offline.sft import sft_objective

    distributed.join_process_group()
    sequences = make_sequences(scale)
    lengths, num_trained = [len(s) for s in sequences], sum(s.num_trained for s in sequences)
    packs, config = make_packs(scale, sequences), scale.config
    flops = training_flops(config, lengths, num_trained)
    objective = bind(sft_objective, StepTotals(num_tokens=num_trained, num_sequences=len(sequences)))
    attention = resolve_attention("auto", device=scale.device.type, dtype=torch.bfloat16)
    schedule: dict[str, Any] = {"learning_rate": 1e-5, "total_steps": 100}
    for stage, checkpointing in ((2, False), (2, True), (3, False)):
        model = make_model(scale, attention)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        zero = DeepSpeedConfig(zero_stage=stage)
        engine = DeepSpeedEngine(PolicyModel(model), zero, optim=OptimConfig(), param_dtype="bf16", **schedule)
        last: dict[str, float] = {}
        cost = measure(partial(_train_step, engine, packs, objective, last), scale)
        # A training step resets PyTorch's peak and reports it, so `measure` sees none.
        if cost is not None and "memory/gpu_gib_max" in last:
            cost = replace(cost, peak_gib=last["memory/gpu_gib_max"])
        setting = f"ZeRO-{stage}{', recomputed layers' if checkpointing else ''}"
        figures: dict[str, Callable[[Cost], float]] = {"tokens_per_s": lambda c: sum(lengths) / c.seconds}
        figures["TFLOP_per_s"] = lambda c: flops / c.seconds / 1e12
        if peak_tflops:
            figures["MFU_%"] = lambda c: 100 * flops / c.seconds / 1e12 / peak_tflops
        yield _row("training", setting, cost, **figures)
        if stage == 2 and not checkpointing:
            yield from _sleep_and_wake(engine, scale)
        # DeepSpeed's gradient hooks refer to the optimizer, so garbage collection alone never frees it.
        engine._engine.destroy()
        del engine, model
        _forget(scale.device)


def _train_step(engine: Any, packs: list[Pack], objective: Any, metrics: dict[str, float]) -> None:
    metrics.update(engine.train_step(packs, objective))


def _sleep_and_wake(engine: Any, scale: Scale) -> Iterator[Row]:
    """Measure the second round, because the first one pins host memory."""
    if scale.device.type != "cuda":
        return
    for _ in range(2):
        before = torch.cuda.memory_allocated(scale.device)
        asleep = _timed(engine.sleep, scale.device)
        freed = (before - torch.cuda.memory_allocated(scale.device)) / GIB
        awake = _timed(engine.wake, scale.device)
    yield Row("sleep", "trainer", {"sleep s": asleep, "wake s": awake, "freed GiB": freed})


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


Run = Callable[[Any], Any]  # in another thread: the trainer blocks in a weight update while engines answer


def rollout(scale: Scale) -> Iterator[Row]:
    """Measure generation, sleep, wake and weight updates with one vLLM engine."""
    from rlhf_cli.backends.rollout.engine import EngineSettings
    from rlhf_cli.backends.rollout.vllm_engine import VllmEngine

    async def start() -> Any:
        return VllmEngine(folder, settings)

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale, "sdpa")
        model.generation_config = GenerationConfig(eos_token_id=0)
        model.save_pretrained(folder)
        run = LoopThread("engine").run
        settings = EngineSettings(
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
            gpu_memory_utilization=MEMORY_SHARE,
            enable_sleep=True,
            sync_backend="ipc",
        )
        begin = time.perf_counter()
        engine = run(start())
        yield Row("rollout", "engine start", {"s": time.perf_counter() - begin})
        try:
            yield from _measured(run, engine, model, scale.device)
        finally:
            run(engine.shutdown())


def _measured(run: Run, engine: Any, model: nn.Module, device: torch.device) -> Iterator[Row]:
    from rlhf_cli.backends.rollout.engine_host import EngineHost
    from rlhf_cli.backends.weight_sync.transfer import WeightSender
    from rlhf_cli.backends.weight_sync.vllm_trainer import EngineClient, HostCall, TensorSpec, connect

    yield from (_generation(run, engine, count) for count in REQUESTS)
    specs = [TensorSpec(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()]

    def call(function: HostCall, given: Sequence[Any]) -> None:
        run(function(EngineHost(engine), given[0]))

    sender = WeightSender(connect("ipc", specs, client=EngineClient(call, num_engines=1), rank=0))
    for version in (1, 2):  # the first round is a warm-up
        free = torch.cuda.mem_get_info()[0]
        seconds = {"sleep s": _timed(lambda: run(engine.sleep()), device)}
        freed = (torch.cuda.mem_get_info()[0] - free) / GIB
        seconds["wake weights s"] = _timed(lambda: run(engine.wake(["weights"])), device)
        report = sender.send(model.named_parameters(), version)
        seconds["wake cache s"] = _timed(lambda: run(engine.wake(["kv_cache"])), device)
    assert run(engine.weight_checksum()) == [report.checksum], "the engine's weights differ from those sent"
    yield Row("sleep", "engine", seconds | {"freed GiB": freed})
    gb = report.num_bytes / 1e9
    yield Row("transfer", "ipc, checksum included", {"s": report.seconds, "GB": gb, "GB/s": gb / report.seconds})


def _generation(run: Run, engine: Any, count: int) -> Row:
    from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams

    requests = [GenerationRequest(list(range(1, 1 + PROMPT_TOKENS)), seed) for seed in range(count)]
    sampling = SamplingParams(NEW_TOKENS)
    run(engine.generate(requests[:8], sampling))
    begin = time.perf_counter()
    generations = run(engine.generate(requests, sampling))
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    return Row("rollout", f"{count} requests of {NEW_TOKENS} tokens", {"tokens/s": num_tokens / seconds})


def peak_tflops(name: str) -> float | None:
    """Return the peak TFLOPS for a GPU name, or None if unknown."""
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)


def rows_of(parts: Sequence[str], scale: Scale, peak: float | None) -> Iterator[Row]:
    """Measure the selected parts."""
    yield from packing(scale) if "packing" in parts else ()
    yield from logits(scale) if "logits" in parts else ()
    yield from training(scale, peak) if "training" in parts else ()
    if "rollout" in parts:
        has_vllm = importlib.util.find_spec("vllm") is not None
        yield from rollout(scale) if has_vllm else [Row("rollout", "not measured: vLLM is not installed", {})]


def figures_table(rows: Iterable[Row]) -> str:
    """Return a result table."""

    def cells(row: Row) -> tuple[str, str, str]:
        return row.part, row.setting, ", ".join(f"{_rounded(value)} {unit}" for unit, value in row.figures.items())

    return table("part | setting | figures", map(cells, rows))


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def parser() -> argparse.ArgumentParser:
    """Return the command line parser."""
    found = make_parser(__doc__)
    found.add_argument("--shape", choices=SHAPES, default="1.5b")
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--sequences", type=int, default=128, help="in one step")
    found.add_argument("--max_tokens", type=int, default=16_384, help="in one micro-batch")
    found.add_argument("--peak_tflops", type=float, help="of the GPU in bfloat16, if its name is unknown")
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
        print(figures_table([row]).splitlines()[-1], flush=True)
        rows.append(row)
    print(f"\n{figures_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
