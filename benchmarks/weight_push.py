"""Times a weight push through shared memory on this machine: the trainer's write, each engine's load.

    python benchmarks/weight_push.py                 an 11M-parameter model in bf16, transformers engines
    python benchmarks/weight_push.py --vllm          the same into a vLLM engine (about 30 s to start)
    python benchmarks/weight_push.py --hidden 1024   a larger one

Leaves out nccl and ipc, which need GPUs: see benchmarks/gpu.py.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender


def save_model(path: str, *, hidden: int, layers: int) -> Qwen2ForCausalLM:
    """A random Qwen2 with a vocabulary of 4096 and heads of 64, saved in bf16."""
    heads = hidden // 64
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else 1,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=0)
    model.save_pretrained(path)
    return model


def make_engine(path: str, *, vllm: bool) -> Any:
    """The engine that is pushed into."""
    settings = EngineSettings(max_model_len=128, enforce_eager=True)
    if vllm:
        from rlhf_cli.backends.rollout.vllm_engine import VllmEngine

        return VllmEngine(path, settings)
    from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(path, settings)


async def push(model: Qwen2ForCausalLM, sender: WeightSender, engines: list[Any], version: int) -> tuple[float, float]:
    """Seconds of the write, and of loading it into all engines at once."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    report = sender.send(model.named_parameters(), version)
    begin = time.perf_counter()

    async def load(engine: Any) -> None:
        await engine.start_weight_update()
        await engine.update_weights(report.manifest)
        await engine.finish_weight_update(version)

    await asyncio.gather(*map(load, engines))
    seconds = time.perf_counter() - begin
    for engine in engines:
        assert await engine.weight_checksum() == [report.checksum]
    return report.seconds, seconds


async def measure(arguments: argparse.Namespace, path: str) -> None:
    """Prints the figures of one run."""
    model = save_model(path, hidden=arguments.hidden, layers=arguments.layers)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    engines = [make_engine(path, vllm=arguments.vllm) for _ in range(arguments.engines)]
    sender = WeightSender(ShmTransport())
    try:
        times = [await push(model, sender, engines, version) for version in range(1, arguments.pushes + 1)]
    finally:
        sender.close()
        for engine in engines:
            await engine.shutdown()
    print(f"{num_bytes / 2e6:.1f}M parameters, {num_bytes / 1e6:.1f} MB, {arguments.engines} engine(s)")
    for name, column in zip(("write", "load"), zip(*times, strict=True), strict=True):
        print(
            f"  {name:5s} median {statistics.median(column):.3f} s, best {min(column):.3f} s, worst {max(column):.3f} s"
        )


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="push into vLLM instead of the transformers engine")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(measure(parser.parse_args(), path))


if __name__ == "__main__":
    main()
