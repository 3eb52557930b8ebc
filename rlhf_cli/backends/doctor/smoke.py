"""Smoke tests for `rlhf doctor`: each runs a main component once, in a separate process.

`python -m rlhf_cli.backends.doctor.smoke NAME FOLDER` runs a test and prints the message. If a library crashes or
hangs, only this process is affected.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.environment import prepare_environment

# On first use, DeepSpeed compiles an operator, which takes about a minute.
_SECONDS = 180.0
"""Timeout per test."""
_TOLERANCE = 1e-4
"""Difference from float32 log-probs, in nats, that another order of float32 sums explains."""


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """A smoke test: display name, function, and how to fix a failure."""

    part: str
    function: Callable[[Path], str]
    cure: str


def smoke_findings(*, end: float) -> Iterator[Finding]:
    """Run all smoke tests, and yield each finding when the test is done.

    Args:
        end: deadline for all tests, on the monotonic clock.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-doctor-") as folder:
        for name, test in _TESTS.items():
            seconds = min(_SECONDS, max(0.0, end - time.monotonic()))
            yield run_test([sys.executable, "-m", __spec__.name, name, folder], test, seconds=seconds)


def run_test(command: list[str], test: SmokeTest, *, seconds: float) -> Finding:
    """Run a test's command. The finding contains the last line printed, or the reason for the failure."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(test.part, "error", f"no result within {seconds:.0f} s", test.cure)
    took = time.monotonic() - start
    if done.returncode == 0:
        return ok(test.part, f"{_last_line(done.stdout)} ({took:.0f} s)")
    reason = _last_line(done.stderr) or f"the process ended with status {done.returncode}"
    return Finding(test.part, "error", reason, test.cure)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def check_attention(folder: Path) -> str:
    """Compare log-probs of packed sequences in the training kernel with single sequences in float32."""
    import torch

    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.data.packing.packs import TokenSequence, pack
    from rlhf_cli.models.compat import attention_name, has_bf16_products
    from rlhf_cli.models.loading import load_causal_lm
    from rlhf_cli.models.policy import PolicyModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype: Literal["bf16", "fp32"] = "bf16" if device.type == "cuda" else "fp32"
    path = _tiny_model(folder)
    sequences = [_sequence(length) for length in (7, 1, 130, 40)]

    def policy(param_dtype: Literal["bf16", "fp32"], kernel: str) -> PolicyModel:
        config = ModelConfig(pretrain=path, param_dtype=param_dtype, attn_implementation=kernel)
        return PolicyModel(load_causal_lm(config, device=device).to(device))

    def logprobs(model: PolicyModel, packs: list[list[TokenSequence]]) -> torch.Tensor:
        return torch.cat([model(pack(one).to(device))[0].float() for one in packs])

    model, singles = policy(dtype, "auto"), [[one] for one in sequences]
    with torch.no_grad():
        exact = logprobs(policy("fp32", "eager"), singles)
        rounding = (logprobs(policy(dtype, "eager"), singles) - exact).abs().max().item()
        difference = (logprobs(model, [sequences]) - exact).abs().max().item()
    # How much rounding to bf16 changes log-probs depends on the model; attending to other sequences changes them more.
    if not difference < _TOLERANCE + 2 * rounding:
        raise AssertionError(
            f"log-probs of packed sequences differ from single ones in float32 by {difference:.2g} nats, of which "
            f"rounding to {dtype} explains {rounding:.2g}"
        )
    kernel = attention_name(model.model.config)
    is_fast = device.type == "cuda" or has_bf16_products()
    speed = "" if is_fast else "; bf16 is slow on this processor: use --param_dtype fp32"
    return f"kernel {kernel} agrees with float32 to {difference:.1g} nats{speed}"


def _check_training(folder: Path) -> str:
    """Run three DeepSpeed steps on the same pack, and check that the loss decreases."""
    from rlhf_cli.backends.training import distributed
    from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
    from rlhf_cli.data.packing.packs import pack
    from rlhf_cli.models.loading import load_causal_lm
    from rlhf_cli.models.policy import PolicyModel

    distributed.join_process_group()
    config = ModelConfig(pretrain=_tiny_model(folder), param_dtype="fp32")
    policy = PolicyModel(load_causal_lm(config, device=distributed.device()))
    engine = DeepSpeedEngine(
        policy,
        DeepSpeedConfig(zero_stage=2),
        optim=OptimConfig(),
        learning_rate=1e-2,
        total_steps=4,
        param_dtype="fp32",
    )
    batch = pack([_sequence(60), _sequence(30)]).to(distributed.device())

    def loss_of(model, micro_batch):
        loss = -model(micro_batch)[0].mean()
        return loss, {"loss": loss.detach()}

    losses = [engine.train_step([batch], loss_of)["loss"] for _ in range(3)]
    distributed.leave_process_group()
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not decrease in three steps: {losses}")
    return f"DeepSpeed ZeRO-2 lowers the loss from {losses[0]:.2f} to {losses[-1]:.2f}"


def check_engine(folder: Path) -> str:
    """Start a rollout engine, generate, push changed weights, and compare log-probs with the trainer's."""
    return asyncio.run(_check_engine(folder))


async def _check_engine(folder: Path) -> str:
    import torch

    from rlhf_cli.backends.rollout.engine import EngineSettings
    from rlhf_cli.backends.rollout.engine_host import make_engine
    from rlhf_cli.backends.weight_sync.shm import ShmTransport
    from rlhf_cli.backends.weight_sync.transfer import WeightSender
    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
    from rlhf_cli.models.loading import load_causal_lm

    backend = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    path = _tiny_model(folder)
    engine = make_engine(backend, path, EngineSettings(max_model_len=128, dtype="fp32", enforce_eager=True))
    prompt, sampling = [5, 6, 7, 8], SamplingParams(max_new_tokens=16)
    (first,) = await engine.generate([GenerationRequest(prompt, seed=1)], sampling)
    model = load_causal_lm(ModelConfig(pretrain=path, param_dtype="fp32", attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    sender = WeightSender(ShmTransport())
    report = sender.send(model.named_parameters(), version=1)
    # Only ranks other than 0 have no manifest.
    assert report.manifest is not None
    await engine.start_weight_update()
    await engine.update_weights(report.manifest)
    await engine.finish_weight_update(1)
    sender.close()
    (pushed,) = await engine.generate([GenerationRequest(prompt, seed=1)], sampling)
    await engine.shutdown()
    tokens = torch.tensor([prompt + pushed.token_ids])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    exact = logits.gather(-1, torch.tensor(pushed.token_ids)[:, None])[:, 0]
    difference = (exact - torch.tensor(pushed.logprobs)).abs().max().item()
    if not difference < 2e-2:
        raise AssertionError(f"after a weight push, engine and trainer log-probs differ by {difference:.2g} nats")
    count = len(first.token_ids) + len(pushed.token_ids)
    return f"{backend} sampled {count} tokens; after a weight push it agrees with the trainer to {difference:.1g} nats"


def _check_ray(folder: Path) -> str:
    """Join or start Ray like an online run, and call a worker process."""
    import ray

    from rlhf_cli.backends.cluster.ray_cluster import ray_cluster

    def answer() -> int:
        return os.getpid()

    with ray_cluster():
        ray.get(ray.remote(num_cpus=0)(answer).remote())
    where = f"the cluster at {address}" if (address := os.environ.get("RAY_ADDRESS")) else "Ray on this machine"
    return f"{where} starts a worker process, which responds"


def _tiny_model(folder: Path) -> str:
    """Create a tiny random model with a tokenizer on first use, and return the folder."""
    from rlhf_cli.config.scratch import ArchitectureConfig
    from rlhf_cli.models.scratch import new_model, save_new_model, train_tokenizer

    path = folder / "model"
    if not path.exists():
        shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        architecture = ArchitectureConfig(**shape, num_key_value_heads=1, initializer_range=0.1)
        tokenizer = train_tokenizer(["one two three"], vocab_size=300)
        save_new_model(new_model(architecture, tokenizer, seed=0).float(), tokenizer, path)
    return str(path)


def _sequence(length: int):
    """Create a sequence in which all tokens except the first are trained."""
    import numpy as np

    from rlhf_cli.data.packing.packs import TokenSequence

    tokens = np.arange(length, dtype=np.int32) % 90 + 10
    return TokenSequence(tokens, np.arange(length) > 0)


_TESTS = {
    "attention": SmokeTest("attention", check_attention, "rlhf doctor --report"),
    "training": SmokeTest("DeepSpeed", _check_training, "rm -rf ~/.cache/torch_extensions && rlhf doctor"),
    "engine": SmokeTest("rollout engine", check_engine, "rlhf doctor --report"),
    "ray": SmokeTest("Ray worker", _check_ray, "RAY_TMPDIR=/tmp rlhf doctor"),
}


def main() -> None:
    """Run the test named on the command line, and print the message. On failure, the last line is the error."""
    name, folder = sys.argv[1:]
    prepare_environment()
    print(_TESTS[name].function(Path(folder)), flush=True)


if __name__ == "__main__":
    main()
