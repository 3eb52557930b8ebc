"""Tests of the real vLLM rollout engine: log-probs, weight updates, reproducibility and shutdown.

An engine takes about 20 s to start, so most tests share one; the others start engines in separate processes.
"""

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_under_test import (
    END,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    Engine,
    Turns,
    change_weights,
    check_versions,
    largest_difference,
    make_engine_model,
    pushed_in_flight,
    trainer_model,
)
from episode_fakes import FakeDialogue, FakeEnvironments, episode_engines
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from rlhf_cli.agents.records import Reply
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.transformers_sampling import processed_logits
from rlhf_cli.backends.rollout.vllm_arguments import argument_names, parsed_arguments
from rlhf_cli.backends.weight_sync.adapter_push import adapter_manifest, vllm_config
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.trainers.online.rollout import generate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

STOPPING = replace(SAMPLING, stop=("e", "7", "Q", "never there"))
LONG = [[7 + index * index % 240 for index in range(length)] for length in (130, 129)]  # a cache block has 128 tokens
SHARING = [GenerationRequest(LONG[index // 8], seed=2000 + index) for index in range(16)]
BATCHES = [(REQUESTS, SAMPLING), (REQUESTS, STOPPING), (SHARING, SAMPLING)]
ADDED = {"max_num_seqs": 64, "additional_config": {"mark": [1, "x"]}}
SETTINGS = EngineSettings(max_model_len=160, dtype="fp32", enforce_eager=True, num_threads=1, vllm_args=ADDED)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_engine_model(tmp_path_factory.mktemp("vllm-model"))


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = Engine(model_dir, SETTINGS)
    yield engine
    processes = engine.engine._processes
    assert processes
    engine.shutdown()
    assert not any(process.is_running() for process in processes)
    engine.shutdown()  # a second call does nothing


@pytest.fixture(scope="module")
def first_responses(engine):
    """Return the engine's responses before any other request."""
    return engine.generate(REQUESTS, SAMPLING)


def test_logprobs_are_the_trainers(first_responses, model_dir):
    assert largest_difference(trainer_model(model_dir), first_responses) < 1e-3


def test_responses_end_with_an_end_token_or_at_the_limit(first_responses):
    assert {one.finish_reason for one in first_responses} == {"stop", "length"}
    for one in first_responses:
        assert len(one.logprobs) == len(one.token_ids)
        ends = [token in END for token in one.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (one.finish_reason == "stop")
        assert one.finish_reason == "stop" or len(one.token_ids) == SAMPLING.max_new_tokens
    assert {one.token_ids[-1] for one in first_responses if one.finish_reason == "stop"} == set(END)


@pytest.fixture(scope="module")
def responses(engine, first_responses):
    """Return the responses to each batch."""
    return [first_responses, *(engine.generate(*batch) for batch in BATCHES[1:])]


def test_responses_end_at_the_token_that_completes_a_stop_string(responses, model_dir):
    first_responses, stopped_responses, _ = responses
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def found(token_ids):
        return any(text in tokenizer.decode(token_ids) for text in STOPPING.stop)

    for one, same in zip(stopped_responses, first_responses, strict=True):
        length = len(same.token_ids)
        end = next((n for n in range(1, length + 1) if found(same.token_ids[:n])), length)
        assert one.token_ids == same.token_ids[:end]
        assert one.logprobs == pytest.approx(same.logprobs[:end], abs=1e-4)  # its batch contains other requests
        assert one.finish_reason == ("stop" if found(one.token_ids) else same.finish_reason)
    assert sum(found(one.token_ids) for one in stopped_responses) > 3


def test_a_stop_string_completed_by_the_last_token_allowed_ends_the_response(engine, model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    (cut,) = engine.generate(REQUESTS[:1], SamplingParams(4))
    assert cut.finish_reason == "length"
    (ended,) = engine.generate(REQUESTS[:1], SamplingParams(4, stop=(tokenizer.decode(cut.token_ids),)))
    assert ended == replace(cut, finish_reason="stop")


def test_samples_of_a_prompt_share_its_cache_and_a_batch_begins_without_any(engine, responses, model_dir):
    assert largest_difference(trainer_model(model_dir), responses[2], SHARING) < 1e-3

    async def num_cached_tokens(name):
        from rlhf_cli.backends.rollout.vllm_batch import vllm_sampling

        prompt = {"type": "token", "prompt_token_ids": LONG[0]}
        params = vllm_sampling(SHARING[0], SamplingParams(1), END)
        return [output.num_cached_tokens async for output in engine.engine._llm.generate(prompt, params, name)]

    engine.generate(REQUESTS, SAMPLING)
    found = [engine.runner.run(num_cached_tokens(name)) for name in ("first", "second")]
    assert found == [[0], [128]]


def test_next_turns_of_episodes_begin_with_what_is_computed_and_repeat_to_the_bit(engine, model_dir):
    sampling = SamplingParams(4)

    def play():
        turns = engine.generate(SHARING, sampling)
        later = [
            replace(request, prompt_ids=[*request.prompt_ids, *turn.token_ids, 9], seed=request.seed + 1)
            for request, turn in zip(SHARING, turns, strict=True)
        ]
        return later, engine.generate(later, replace(sampling, continues=True))

    later, turns = play()
    assert largest_difference(trainer_model(model_dir), turns, later, sampling=sampling) < 1e-3
    assert play() == (later, turns)


def test_requests_that_join_a_batch_have_the_responses_of_a_batch_of_their_own(engine, first_responses):
    """Requests may arrive while others run, or after the batch has finished."""

    async def responses_in_parts():
        found = {}

        async def collect():
            while not (arrivals := await engine.engine.collect()).is_last:
                found.update(arrivals.responses)
            found.update(arrivals.responses)

        await engine.engine.begin(REQUESTS[:20], SAMPLING)
        found.update((await engine.engine.collect()).responses)
        assert len(found) < 20
        for first in range(20, 40, 5):
            await engine.engine.add(REQUESTS[first : first + 5])
        await collect()
        assert sorted(found) == list(range(40))
        await engine.engine.add(REQUESTS[40:])
        await collect()
        return [found[number] for number in range(len(REQUESTS))]

    found = engine.runner.run(responses_in_parts())
    assert [one.token_ids for one in found] == [one.token_ids for one in first_responses]
    for one, same in zip(found, first_responses, strict=True):
        assert one.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_a_request_that_does_not_fit_fails_the_batch_that_it_joins_and_no_other(engine, first_responses):
    async def joined():
        await engine.engine.begin(REQUESTS[:3], SAMPLING)
        await engine.engine.add([GenerationRequest([5] * 150, 0)])
        while not (await engine.engine.collect()).is_last:
            pass

    with pytest.raises(UsageError, match="prompt 0 has 150 tokens"):
        engine.runner.run(joined())
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_a_cut_gives_up_what_runs_and_what_joins_later(engine, first_responses):
    async def joined():
        await engine.engine.begin(REQUESTS, SamplingParams(140))
        await engine.engine.cut(0)
        await engine.engine.add(REQUESTS[:5])
        found = []
        while not (arrivals := await engine.engine.collect()).is_last:
            found += arrivals.responses
        return len(found + arrivals.responses)

    assert engine.runner.run(joined()) < len(REQUESTS)
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_responses_do_not_depend_on_what_the_engine_did_before(engine, first_responses):
    engine.generate(REQUESTS[::-1], SamplingParams(7))
    engine.sleep(2)
    assert engine.engine._asleep
    with pytest.raises(RunError, match="asleep"):
        engine.generate(REQUESTS, SAMPLING)
    engine.wake(["weights"])
    assert engine.engine._asleep
    engine.wake(["kv_cache"])
    assert not engine.engine._asleep
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_calls_at_the_same_time_are_served_one_after_the_other(engine, first_responses):
    async def both():
        return await asyncio.gather(
            engine.engine.generate(REQUESTS[:7], SamplingParams(9)), engine.engine.generate(REQUESTS, SAMPLING)
        )

    assert engine.runner.run(both())[1] == first_responses


def test_a_cancelled_call_leaves_the_engine_usable(engine, first_responses):
    async def cancelled():
        call = asyncio.ensure_future(engine.engine.generate(REQUESTS, SamplingParams(140)))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    engine.runner.run(cancelled())
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_a_prompt_that_leaves_no_room_is_named(engine):
    with pytest.raises(UsageError, match="prompt 1 has 150 tokens"):
        engine.generate([REQUESTS[0], GenerationRequest([5] * 150, 0)], SAMPLING)


def test_heads_that_vllm_does_not_know_are_refused_before_it_starts(tiny_model_dir):
    with pytest.raises(UsageError, match="attention head size 8; vLLM on a CPU supports 32, 64"):
        Engine(tiny_model_dir, SETTINGS)


def test_greedy_responses_are_transformers_own(engine, model_dir):
    model = trainer_model(model_dir)
    generations = engine.generate([GenerationRequest(prompt, 0) for prompt in PROMPTS], SamplingParams(12, greedy=True))
    for prompt, one in zip(PROMPTS, generations, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert one.token_ids == expected.tolist()


def test_engine_arguments_of_a_user_arrive_in_vllm_s_own_configuration(engine):
    found = engine.engine._llm.vllm_config
    assert (found.scheduler_config.max_num_seqs, found.additional_config) == (64, {"mark": [1, "x"]})


def test_engine_arguments_are_read_by_vllm_s_own_parser():
    given = {
        "max_num_batched_tokens": "1k",
        "kv_cache_dtype": "fp8",
        "disable_log_stats": False,
        "enable_log_requests": True,
        "cudagraph_capture_sizes": [1, 2, 4],
        "hf_overrides": {"rope_theta": 3},
    }
    assert parsed_arguments(given) == given | {"max_num_batched_tokens": 1000}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_num_seqs": "many"}, "argument --max-num-seqs: invalid int value: 'many'"),
        ({"max_num_seqs": True}, "argument --max-num-seqs: invalid int value: 'true'"),
        ({"max_num_seqs": None}, "max_num_seqs has no value"),
        ({"kv_cache_dtype": "int3"}, "argument --kv-cache-dtype: invalid choice: 'int3'"),
        ({"enable_log_requests": "yes"}, 'enable_log_requests must be true or false, not "yes"'),
        ({"max_num_seq": 3}, "no engine argument max_num_seq (did you mean max_num_seqs?)"),
        ({"compilation_config": {"nix": 1}}, "CompilationConfig nix Unexpected keyword argument"),
    ],
)
def test_a_value_that_vllm_does_not_take_is_refused_in_one_sentence(given, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)) as raised:
        parsed_arguments(given)
    assert "\n" not in str(raised.value)
    assert "http" not in str(raised.value)


def test_names_read_from_vllm_s_source_are_those_of_its_class():
    from vllm import AsyncEngineArgs

    assert argument_names() == {name for name in AsyncEngineArgs.__dataclass_fields__ if not name.startswith("_")}


CHOOSY = SamplingParams(16, temperature=0.7, top_p=0.8, top_k=12, min_p=0.05, repetition_penalty=1.4)


@pytest.mark.parametrize("sampling", [CHOOSY, SamplingParams(16, repetition_penalty=1.4, greedy=True)])
def test_logprobs_are_of_the_distribution_that_the_engine_of_transformers_draws_from(engine, model_dir, sampling):
    model = trainer_model(model_dir)
    for request, one in zip(REQUESTS[:10], engine.generate(REQUESTS[:10], sampling), strict=True):
        sequence = request.prompt_ids + one.token_ids
        first = len(request.prompt_ids)
        logits = model(torch.tensor([sequence])).logits[0, first - 1 : -1].float()
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for row in range(len(one.token_ids)):
            seen[row, sequence[: first + row]] = True
        logprobs = processed_logits(logits, sampling, seen_BV=seen).log_softmax(-1)
        found = logprobs.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()
        assert one.logprobs == pytest.approx(found, abs=1e-3)


@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 1e-3])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_choosing_among_tokens_gives_the_probabilities_of_vllm_s_own_operators(top_k, top_p, min_p):
    from types import SimpleNamespace

    from vllm import SamplingParams as VllmSampling
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.ops.penalties import apply_all_penalties
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    rows, size = 6, 500
    torch.manual_seed(top_k)
    logits = torch.randn(rows, size) * 4
    if top_p == 1:  # top-p 1 keeps all tokens; below, ties between equally likely tokens are not defined
        logits = logits.round()
    prompts, responses = torch.randint(0, size, (rows, 9)), torch.randint(0, size, (rows, 30))
    none = torch.zeros(rows)
    expected = apply_all_penalties(logits.clone(), prompts, none, none, none + 1.3, responses.tolist()) / 0.7
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added: list[Any] = [(row, VllmSampling(min_p=min_p), None, []) for row in range(rows)]
    processor.update_state(BatchUpdate(batch_size=rows, removed=[], moved=[], added=added))
    expected = processor.apply(expected)
    k = torch.full((rows,), top_k) if top_k else None
    p = torch.full((rows,), top_p) if top_p < 1 else None
    expected = apply_top_k_top_p(expected, k, p).softmax(-1)
    seen = torch.zeros(rows, size, dtype=torch.bool).scatter_(1, torch.cat([prompts, responses], dim=1), True)
    sampling = SamplingParams(1, 0.7, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=1.3)
    torch.testing.assert_close(processed_logits(logits, sampling, seen_BV=seen).softmax(-1), expected)


FRESH = """
import asyncio, json, os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent / "helpers"), str(Path(sys.argv[2]).parent)]
from test_vllm_engine import BATCHES, REQUESTS, SAMPLING, SETTINGS
from rlhf_cli.backends.rollout.engine import EngineDead
from rlhf_cli.backends.rollout.vllm_engine import VllmEngine
from rlhf_cli.data.rollouts import SamplingParams

async def main():
    engine = VllmEngine(sys.argv[1], SETTINGS)
    found = [await engine.generate(*batch) for batch in BATCHES]
    Path(sys.argv[3]).write_text(json.dumps([[[one.token_ids, one.logprobs] for one in batch] for batch in found]))
    core = next(process for process in engine._processes if "EngineCore" in process.name())
    call = asyncio.ensure_future(engine.generate(REQUESTS, SamplingParams(140)))
    if sys.argv[4] == "owner":
        await asyncio.sleep(0.3)
        Path(sys.argv[3] + ".pids").write_text(json.dumps([process.pid for process in engine._processes]))
        os.kill(os.getpid(), 9)
    await asyncio.sleep(0.3)
    core.kill()
    begin = time.monotonic()
    try:
        await call
    except EngineDead:
        first = time.monotonic() - begin
    for verb in (engine.generate(REQUESTS, SAMPLING), engine.start_weight_update(), engine.sleep()):
        try:
            await verb
        except EngineDead:
            continue
        raise SystemExit("a dead engine answered")
    await engine.shutdown()
    assert not any(process.is_running() for process in engine._processes)
    print("seconds", first)

if __name__ == "__main__":
    asyncio.run(main())
"""


def fresh_process(model_dir, output, what):
    root, here = Path(__file__).parents[2], Path(__file__).parent
    script = output.with_suffix(".py")
    script.write_text(FRESH)
    return subprocess.run(
        [sys.executable, str(script), model_dir, str(here), str(output), what],
        check=False,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(root)),
        timeout=300,
    )


def same_bits(output, responses):
    return json.loads(output.read_text()) == [[[one.token_ids, one.logprobs] for one in batch] for batch in responses]


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_bits_and_a_killed_core_is_noticed_at_once(model_dir, responses, tmp_path):
    output = tmp_path / "fresh.json"
    done = fresh_process(model_dir, output, "core")
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_bits(output, responses)
    assert float(done.stdout.split("seconds")[1]) < 3


@pytest.mark.slow
def test_processes_end_with_a_killed_owner(model_dir, responses, tmp_path):
    output = tmp_path / "owner.json"
    done = fresh_process(model_dir, output, "owner")
    assert done.returncode == -signal.SIGKILL
    assert same_bits(output, responses)
    deadline = time.monotonic() + 10
    pids = json.loads(Path(f"{output}.pids").read_text())
    assert pids
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.1)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_wrong_push_is_refused_by_name_and_leaves_the_weights(engine, model_dir, first_responses, tmp_path):
    model = trainer_model(model_dir)
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    weights = dict(model.named_parameters())
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(RunError, match=r"missing model\.layers\.1\.self_attn\.k_proj\.weight$"):
        engine.push(sender.send(weights.items(), version=1).manifest, 1)
    engine._close_update()
    manifest = sender.send(model.named_parameters(), version=1).manifest
    assert manifest is not None
    with pytest.raises(RunError, match="weight push 1: checksum"):
        engine.push(manifest | {"checksum": 1}, 1)
    engine._close_update()
    sender.close()
    assert engine.engine._version == 0
    assert engine.generate(REQUESTS, SAMPLING) == first_responses


def test_after_a_push_of_other_weights_the_engine_agrees_with_them(engine, model_dir, first_responses, tmp_path):
    model = trainer_model(model_dir)
    change_weights(model)
    assert largest_difference(model, first_responses) > 0.5
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    for version in (1, 2):  # the second update replaces the first
        engine.generate(SHARING, SAMPLING)  # leaves prefixes of the old weights in the cache
        report = sender.send(model.named_parameters(), version)
        engine.push(report.manifest, version)
        turns = engine.generate(SHARING, replace(SAMPLING, continues=True))
        assert largest_difference(model, turns, SHARING) < 1e-3
        after = engine.generate(REQUESTS, SAMPLING)
        assert largest_difference(model, after) < 1e-3
        assert {one.weight_version for one in after} == {version}
        assert engine.weight_checksum() == [report.checksum]
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.1)  # also changes the tied head
            model.model.layers[0].mlp.down_proj.weight.neg_()
    original = sender.send(trainer_model(model_dir).named_parameters(), version=3).manifest
    engine.push(original, 3)
    assert engine.generate(REQUESTS, SAMPLING) == [replace(one, weight_version=3) for one in first_responses]
    sender.close()


class ShortTurns(FakeDialogue):
    end_ids = tuple(range(60, 200))


@pytest.mark.parametrize("in_step", [True, False])
def test_turns_of_episodes_have_the_log_probs_of_one_forward_pass_also_after_a_push(
    engine, model_dir, tmp_path, in_step
):
    requests = [GenerationRequest(PROMPTS[index % 5], seed=index) for index in range(24)]
    environments = FakeEnvironments(lambda episode, turn, action: Reply(("ok",) if turn else (), is_done=turn == 3))
    episodes = episode_engines(
        Turns(engine), environments, dialogue=ShortTurns(), max_turns=3, max_len=150, in_step=in_step
    )
    model, sender = trainer_model(model_dir), WeightSender(ShmTransport(folders=(str(tmp_path),)))
    for version in (11, 12):
        engine.push(sender.send(model.named_parameters(), version).manifest, version)
        found = asyncio.run(generate(episodes, requests, SamplingParams(16)))
        assert sum(len(one.turns) == 3 for one in found) > 20
        assert {one.weight_version for one in found} == {version}
        for request, one in zip(requests, found, strict=True):
            logprobs = logprobs_of_turns(model, request, one)
            assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
        change_weights(model)
    sender.close()


def logprobs_of_turns(model, request, episode):
    """Compute the log-probs of the sampled tokens with one forward pass over the whole episode."""
    tokens = torch.tensor(request.prompt_ids + episode.token_ids)
    first = len(request.prompt_ids)
    every = model(tokens[None]).logits[0].float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return [value for start, end in episode.turns for value in every[first + start - 1 : first + end - 1].tolist()]


@torch.no_grad()
def test_a_response_goes_on_with_the_weights_that_are_pushed_in_its_middle(engine, model_dir, tmp_path):
    old, new, sender = (
        trainer_model(model_dir),
        trainer_model(model_dir),
        WeightSender(ShmTransport(folders=(str(tmp_path),))),
    )
    change_weights(new)
    engine.push(sender.send(old.named_parameters(), 20).manifest, 20)
    sampling = replace(SAMPLING, max_new_tokens=140)
    manifest = sender.send(new.named_parameters(), 21).manifest
    found = pushed_in_flight(engine, REQUESTS[:40], sampling, manifest, 21)
    check_versions({20: old, 21: new}, found, REQUESTS[:40], sampling)
    began, joined = found[:20], found[20:]
    mixed = [one for one in began if one.version_runs]
    assert len(mixed) > 5
    assert {tuple(version for version, _ in one.runs) for one in mixed} == {(20, 21)}
    assert {one.weight_version for one in mixed} == {20}
    assert {one.runs for one in joined} == {((21, one.num_sampled),) for one in joined}
    assert any(one.runs == ((20, one.num_sampled),) for one in began)
    sender.close()


def test_a_batch_that_comes_within_a_push_waits_for_its_end(engine, model_dir, tmp_path):
    sender, vllm = WeightSender(ShmTransport(folders=(str(tmp_path),))), engine.engine
    manifest = sender.send(trainer_model(model_dir).named_parameters(), 22).manifest

    async def begun_within():
        await vllm.start_weight_update()
        generating = asyncio.ensure_future(vllm.generate(REQUESTS, SAMPLING))
        await asyncio.sleep(0)
        await vllm.update_weights(manifest)
        assert not generating.done()
        await vllm.finish_weight_update(22)
        return await generating

    assert {one.runs[0][0] for one in engine.runner.run(begun_within())} == {22}
    sender.close()


@pytest.mark.slow
def test_an_engine_that_gets_adapters_in_turn_and_none_has_the_log_probs_of_the_merged_models(model_dir):
    taking = Engine(model_dir, replace(SETTINGS, vllm_args={}, max_lora_rank=8))
    pushed: list[tuple[Any, dict[str, torch.Tensor], dict[str, object]]] = []
    turns = [LoraConfig(r=8, use_rslora=True, target_modules=["q_proj", "down_proj"]), None]
    turns += [LoraConfig(r=3, lora_alpha=9, target_modules=["k_proj", "v_proj", "up_proj"])]
    for version, config in enumerate(turns, start=1):
        model, tensors = trainer_model(model_dir), {}
        if config is not None:
            adapted = get_peft_model(model, config)
            torch.manual_seed(version)
            factors = {name: tensor for name, tensor in adapted.named_parameters() if "lora_" in name}
            for name, factor in factors.items():
                factor.data = torch.randn_like(factor) * 0.2
                tensors[name.replace(".default", "")] = factor
            model = adapted.merge_and_unload()
        settings = {} if config is None else vllm_config(config)
        pushed.append((model, tensors, settings))
        taking.push(adapter_manifest(tensors.items(), settings, version=version), version)
        generations = taking.generate(REQUESTS, SAMPLING)
        assert largest_difference(model, generations) < 1e-3
        assert {generation.weight_version for generation in generations} == {version}
        if config is not None:
            assert largest_difference(trainer_model(model_dir), generations) > 0.1
    again, tensors, settings = pushed[0]
    sampling, manifest = replace(SAMPLING, max_new_tokens=140), adapter_manifest(tensors.items(), settings, version=4)
    found = pushed_in_flight(taking, REQUESTS, sampling, manifest, 4)
    with torch.no_grad():
        check_versions({3: model, 4: again}, found, REQUESTS, sampling)
    assert sum(bool(one.version_runs) for one in found) > 5
    taking.shutdown()


def test_an_engine_that_does_not_start_says_what_its_settings_lack(model_dir):
    from rlhf_cli.backends.rollout.vllm_engine import VllmEngine

    positions = json.loads((Path(model_dir) / "config.json").read_text())["max_position_embeddings"]
    too_long = replace(SETTINGS, max_model_len=positions + 1)
    with pytest.raises(RunError, match=rf"max_model_len \({positions + 1}\) is greater than .*; see the engine's log"):
        VllmEngine(model_dir, too_long)
