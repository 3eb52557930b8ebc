"""The rollout part of benchmarks/gpu.py: generation, sleep and wake of a vLLM engine, and a push of weights by ipc.

Needs vLLM. Leaves out several engines and nccl, which need more than one GPU.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_training import GIB, Row, Scale, make_model
from transformers import GenerationConfig

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_host import EngineHost
from rlhf_cli.backends.rollout.vllm_engine import VllmEngine
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.backends.weight_sync.vllm_trainer import EngineClient, HostCall, TensorSpec, connect
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.event_loop import LoopThread

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = (256, 1024), 64, 512
SHARE = 0.5  # of the GPU's memory that the engine takes

Run = Callable[[Any], Any]
"""Returns the result of a coroutine in another thread: the trainer's side of a push blocks while engines answer."""


def rollout(scale: Scale) -> Iterator[Row]:
    """Generation, sleep, wake and push with one engine on the device."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(scale, "sdpa")
        model.generation_config = GenerationConfig(eos_token_id=0)
        model.save_pretrained(folder)
        run = LoopThread("engine").run
        settings = EngineSettings(
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
            gpu_memory_utilization=SHARE,
            enable_sleep=True,
            sync_backend="ipc",
        )
        begin = time.perf_counter()
        engine = run(_built(folder, settings))
        yield Row("rollout", "engine start", {"s": time.perf_counter() - begin})
        try:
            yield from _measured(run, engine, model)
        finally:
            run(engine.shutdown())


async def _built(folder: str, settings: EngineSettings) -> VllmEngine:
    return VllmEngine(folder, settings)


def _measured(run: Run, engine: VllmEngine, model: torch.nn.Module) -> Iterator[Row]:
    yield from (_generation(run, engine, count) for count in REQUESTS)
    specs = [TensorSpec(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()]

    def call(function: HostCall, given: Sequence[Any]) -> None:
        run(function(EngineHost(engine), given[0]))

    sender = WeightSender(connect("ipc", specs, client=EngineClient(call, num_engines=1), rank=0))
    for version in (1, 2):  # the first round sets things up
        free = torch.cuda.mem_get_info()[0]
        seconds = {"sleep s": _timed(lambda: run(engine.sleep()))}
        freed = (torch.cuda.mem_get_info()[0] - free) / GIB
        seconds["wake weights s"] = _timed(lambda: run(engine.wake(["weights"])))
        report = sender.send(model.named_parameters(), version)
        seconds["wake cache s"] = _timed(lambda: run(engine.wake(["kv_cache"])))
    assert run(engine.weight_checksum()) == [report.checksum], "the engine's weights differ from those sent"
    yield Row("sleep", "engine", seconds | {"freed GiB": freed})
    gb = report.num_bytes / 1e9
    yield Row("transfer", "ipc, checksum included", {"s": report.seconds, "GB": gb, "GB/s": gb / report.seconds})


def _generation(run: Run, engine: VllmEngine, count: int) -> Row:
    requests = [GenerationRequest(list(range(1, 1 + PROMPT_TOKENS)), seed) for seed in range(count)]
    sampling = SamplingParams(NEW_TOKENS)
    run(engine.generate(requests[:8], sampling))
    begin = time.perf_counter()
    generations = run(engine.generate(requests, sampling))
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(generation.token_ids) for generation in generations)
    return Row("rollout", f"{count} requests of {NEW_TOKENS} tokens", {"tokens/s": num_tokens / seconds})


def _timed(action: Any) -> float:
    begin = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
