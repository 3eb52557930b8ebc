"""Requests that take the rows of finished ones in the transformers engine, and change no response by that."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pictured_engines import SAMPLING as PICTURED_SAMPLING
from pictured_engines import pictured_requests
from test_rollout_transformers import SETTINGS, Shapes
from tiny_vision import save_tiny_vision
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.rollout.stop_strings import StopStrings
from rlhf_cli.backends.rollout.transformers_batch import TransformersBatch
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=40)
# Most responses are short, a few long.
LIMITS = [3, 40, 5, 4, 2, 6, 31, 3, 4, 5]
REQUESTS = [
    GenerationRequest([5 + index] * (2 + index % 4), seed=index, max_new_tokens=LIMITS[index % 10])
    for index in range(30)
]
NO_LIMIT = 1 << 40
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    engine = TransformersEngine(tiny_model_dir, SETTINGS)
    yield engine
    asyncio.run(engine.shutdown())


def saved(model, folder):
    model.save_pretrained(folder)
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": 299}))
    return str(folder)


@torch.inference_mode()
def run(
    engine, requests=REQUESTS, sampling=SAMPLING, *, rows, cache_bytes=NO_LIMIT, stop=None, max_tokens=lambda: NO_LIMIT
):
    """Return ({number: response}, shapes of the forward passes) of a batch with at most `rows` rows."""
    batch = TransformersBatch(
        engine._model,
        sampling,
        eos=engine._eos,
        stop=stop,
        tower=engine._tower,
        max_rows=rows,
        cache_bytes=cache_bytes,
    )
    waiting = [dict(enumerate(requests))]
    found: dict[int, Generation] = {}
    with Shapes(engine._model) as seen:
        batch.run(0, arrived=lambda: waiting.pop() if waiting else {}, add=found.__setitem__, max_tokens=max_tokens)
    return found, seen


def num_steps(shapes):
    return sum(length == 1 for _, length in shapes)


def assert_same(found, whole):
    assert found.keys() == whole.keys()
    for number, one in found.items():
        assert (one.token_ids, one.finish_reason) == (whole[number].token_ids, whole[number].finish_reason)
        assert one.logprobs == pytest.approx(whole[number].logprobs, abs=1e-4)


def test_a_waiting_request_takes_the_row_of_a_finished_one(engine):
    requests = [GenerationRequest([5 + n, 9], seed=n, max_new_tokens=limit) for n, limit in enumerate((4, 2, 3, 1))]
    found, shapes = run(engine, requests, rows=2)
    # Responses 0 and 1; at the second token, 1 ends and 2 joins; at the fourth, 0 ends and 3 joins.
    assert shapes == [(2, 2), (2, 1), (1, 1), (1, 2), (2, 1), (1, 1), (1, 2)]
    assert [len(found[number].token_ids) for number in range(4)] == [4, 2, 3, 1]


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir", "tiny_moe_dir"])
def test_responses_with_joins_are_those_of_one_batch_and_repeat_bit_for_bit(fixture, request):
    engine = TransformersEngine(request.getfixturevalue(fixture), SETTINGS)
    whole, _ = run(engine, rows=len(REQUESTS))
    joined, shapes = run(engine, rows=4)
    assert_same(joined, whole)
    assert run(engine, rows=4) == (joined, shapes)
    # Four at a time, one after the other, take the longest of each four.
    order = sorted(range(30), key=lambda number: (len(REQUESTS[number].prompt_ids), number))
    limits = [REQUESTS[number].limit(SAMPLING) for number in order]
    assert num_steps(shapes) < 0.7 * sum(max(limits[first : first + 4]) - 1 for first in range(0, 30, 4))
    asyncio.run(engine.shutdown())


def test_stop_strings_and_a_repetition_penalty_see_what_they_see_without_joins(engine, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    penalized = replace(SAMPLING, greedy=True, repetition_penalty=1.3)
    whole, _ = run(engine, sampling=penalized, rows=len(REQUESTS))
    assert_same(run(engine, sampling=penalized, rows=4)[0], whole)
    assert whole[1].token_ids != run(engine, sampling=replace(SAMPLING, greedy=True), rows=4)[0][1].token_ids
    stop = StopStrings(tokenizer, (tokenizer.decode(whole[1].token_ids[10:12]),))
    stopped, _ = run(engine, sampling=penalized, rows=4, stop=stop)
    assert stopped[1].finish_reason == "stop"
    assert_same(stopped, run(engine, sampling=penalized, rows=len(REQUESTS), stop=stop)[0])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "idefics3"])
def test_requests_with_images_join(kind, tmp_path):
    engine = TransformersEngine(
        str(save_tiny_vision(kind, tmp_path)), replace(SETTINGS, max_model_len=256, max_images_per_prompt=2)
    )
    requests = [
        replace(request, max_new_tokens=2 + 3 * (number % 3))
        for number, request in enumerate(pictured_requests(tmp_path))
    ]
    whole, _ = run(engine, requests, PICTURED_SAMPLING, rows=len(requests))
    assert_same(run(engine, requests, PICTURED_SAMPLING, rows=2)[0], whole)
    asyncio.run(engine.shutdown())


def test_the_rows_fit_the_cache(engine):
    whole, _ = run(engine, rows=len(REQUESTS))
    # 2 layers, keys and values, 2 heads of 8 numbers: 256 bytes a token. 4 rows of up to 45 tokens, or more short ones.
    found, shapes = run(engine, rows=len(REQUESTS), cache_bytes=256 * 45 * 4)
    assert_same(found, whole)
    assert 2 <= max(rows for rows, _ in shapes) <= 8
    one_by_one, shapes = run(engine, rows=len(REQUESTS), cache_bytes=0)
    assert_same(one_by_one, whole)
    assert {rows for rows, _ in shapes} == {1}


def test_a_sliding_window_is_joined_when_no_row_is_left(tmp_path):
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPE,
        intermediate_size=48,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    )
    engine = TransformersEngine(saved(Qwen2ForCausalLM(config), tmp_path), SETTINGS)
    whole, _ = run(engine, rows=len(REQUESTS))
    found, shapes = run(engine, rows=4)
    assert_same(found, whole)
    assert sum(length > 1 for _, length in shapes) == 8  # 30 requests, 4 at a time
    asyncio.run(engine.shutdown())


def test_a_finished_row_samples_nothing_beyond_the_positions_of_the_model(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.2)
    engine = TransformersEngine(saved(GPT2LMHeadModel(config), tmp_path), replace(SETTINGS, max_model_len=24))
    engine._eos = []
    # One finished row of six stays, because it is less than a fifth.
    short = [GenerationRequest([5 + number, 9], seed=number) for number in range(5)]
    requests = [GenerationRequest([7] * 20, seed=9, max_new_tokens=4), *short]
    found, _ = run(engine, requests, SamplingParams(20), rows=6)
    assert sorted(len(one.token_ids) for one in found.values()) == [4, 20, 20, 20, 20, 20]
    asyncio.run(engine.shutdown())


def test_the_moment_of_a_cut_changes_no_response(engine):
    whole, _ = run(engine, rows=4)
    for late in (0, 7, 30, 50):
        calls = iter([NO_LIMIT] * late)
        found, _ = run(engine, rows=4, max_tokens=lambda calls=calls: next(calls, 6))
        assert {number: one for number, one in whole.items() if len(one.token_ids) <= 6}.items() <= found.items()
        assert found.items() <= whole.items()


def test_a_cut_ends_the_last_rows(engine):
    requests = [
        replace(request, max_new_tokens=limit) for request, limit in zip(REQUESTS, (3, 40, 30, 5), strict=False)
    ]
    found, shapes = run(engine, requests, rows=4, max_tokens=lambda: 5)
    assert sorted(found) == [0, 3]
    assert num_steps(shapes) == 4


def test_a_cut_of_0_ends_waiting_requests_too(engine):
    found, shapes = run(engine, rows=4, max_tokens=lambda: 0)
    assert found == {}
    assert len(shapes) == 1
