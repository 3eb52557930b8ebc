"""vLLM engine for tests: tiny model, requests, and trainer log-probs for its responses."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_host import make_engine
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [20] * 9, [3]]
REQUESTS = [GenerationRequest(PROMPTS[index % 5], seed=1000 + index) for index in range(60)]
SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95)
END = [1, 2]


def make_engine_model(path: Path) -> str:
    """Save a byte-level Qwen2 with tied embeddings and two end tokens, and head sizes for vLLM's CPU attention."""
    from conftest import make_tiny_tokenizer
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=True,
        eos_token_id=END,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END)
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return str(path)


class Engine:
    """A vLLM engine like in an engine process, with blocking methods in one event loop."""

    def __init__(self, path: str, settings: EngineSettings):
        self.runner = asyncio.Runner()
        self.engine: Any = make_engine("vllm", path, settings)

    def __getattr__(self, name):
        return lambda *args: self.runner.run(getattr(self.engine, name)(*args))

    def push(self, manifest, version):
        self.start_weight_update()
        self.update_weights(manifest)
        self.finish_weight_update(version)


def pushed_in_flight(engine, requests, sampling, manifest, version):
    """Return a batch's responses, with weights pushed when the first ones arrive. Half of the requests are added during
    the push.
    """
    half = len(requests) // 2

    async def responses():
        vllm = engine.engine
        await vllm.begin(requests[:half], sampling)
        arrivals = await vllm.collect()
        found = dict(arrivals.responses)
        assert not arrivals.is_last
        await vllm.start_weight_update()
        await vllm.add(requests[half:])
        await vllm.update_weights(manifest)
        await vllm.finish_weight_update(version)
        while not arrivals.is_last:
            arrivals = await vllm.collect()
            found |= dict(arrivals.responses)
        return [found[number] for number in range(len(requests))]

    return engine.runner.run(responses())


class Turns:
    """Engine methods used by episodes."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1)  # the engine has an event loop of its own
        self.is_generating = False

    def begin(self, requests, sampling):
        self._thread.submit(self._engine.begin, requests, sampling).result()
        self.is_generating = True

    def add(self, requests):
        self._thread.submit(self._engine.add, requests).result()
        self.is_generating = True

    async def collect(self, timeout=None):
        # Blocks, so that no request is added meanwhile.
        arrivals = self._thread.submit(self._engine.collect).result()
        self.is_generating = not arrivals.is_last
        return arrivals.responses


def processed_logprobs(model, request, generation, sampling):
    """Compute response log-probs after temperature and top-p explicitly."""
    tokens = torch.tensor([request.prompt_ids + generation.token_ids])
    logprobs = (model(tokens).logits[0].float() / sampling.temperature).log_softmax(-1)
    logprobs = logprobs[len(request.prompt_ids) - 1 : -1]
    ascending, order = logprobs.sort(dim=-1)
    outside = ascending.exp().cumsum(-1) <= 1 - sampling.top_p
    outside[:, -1] = False
    kept = ascending.masked_fill(outside, -torch.inf).log_softmax(-1)
    kept = torch.empty_like(kept).scatter_(-1, order, kept)
    return kept.gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]


def largest_difference(model, generations, requests=REQUESTS, *, sampling=SAMPLING):
    largest = 0.0
    for request, generation in zip(requests, generations, strict=True):
        found = torch.tensor(generation.logprobs)
        difference = (processed_logprobs(model, request, generation, sampling) - found).abs().max()
        largest = max(largest, difference.item())
    return largest


def check_versions(models, generations, requests, sampling):
    """Check that each token has the log-prob of its weight version's model."""
    for request, generation in zip(requests, generations, strict=True):
        start = 0
        for version, count in generation.runs:
            own = processed_logprobs(models[version], request, generation, sampling)[start : start + count]
            assert generation.logprobs[start : start + count] == pytest.approx(own.tolist(), abs=1e-3)
            start += count
        assert start == len(generation.token_ids)


def trainer_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def change_weights(model):
    """Change the weights so that answers differ."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2).add_(torch.randn_like(parameter) * 0.05)
