"""The transformers rollout engine on tiny models: log-probs of the model, and sampling by request seeds."""

import asyncio
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.rollout.engine import EngineSettings, eos_token_ids
from rlhf_cli.backends.rollout.engine_host import make_engine
from rlhf_cli.backends.rollout.transformers_engine import TransformersEngine
from rlhf_cli.backends.weight_sync.shm import ShmTransport
from rlhf_cli.backends.weight_sync.transfer import WeightSender, weights_checksum
from rlhf_cli.config.rollout import EngineConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.checkpoint_names import as_in_checkpoint

SETTINGS = EngineSettings(max_model_len=64, dtype="fp32")
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15]]
REQUESTS = [GenerationRequest(PROMPTS[index % 3], seed=100 + index) for index in range(18)]
SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.8)


class Engine:
    """The engine with synchronous methods, in one event loop."""

    def __init__(self, path, settings=SETTINGS):
        self.runner = asyncio.Runner()
        self.engine = TransformersEngine(str(path), settings)

    def __getattr__(self, name):
        return lambda *args: self.runner.run(getattr(self.engine, name)(*args))

    def shutdown(self):
        self.runner.run(self.engine.shutdown())
        self.runner.close()


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    engine = Engine(tiny_model_dir)
    yield engine
    engine.shutdown()


def model_logprobs(model, request, generation, temperature=1.0):
    tokens = torch.tensor([request.prompt_ids + generation.token_ids])
    logprobs = (model(tokens).logits[0].float() / temperature).log_softmax(-1)
    at = logprobs[len(request.prompt_ids) - 1 : -1]
    return at.gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]


def largest_difference(model, requests, generations, temperature):
    return max(
        (model_logprobs(model, request, generation, temperature) - torch.tensor(generation.logprobs)).abs().max()
        for request, generation in zip(requests, generations, strict=True)
    )


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir"])
def test_logprobs_are_those_of_a_plain_forward_pass(fixture, request):
    path = request.getfixturevalue(fixture)
    engine = Engine(path)
    generations = engine.generate(REQUESTS, SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert largest_difference(model, REQUESTS, generations, SAMPLING.temperature) < 1e-4
    engine.shutdown()


def test_a_model_of_the_hub_is_taken_by_its_name(engine, tiny_model_dir, tmp_path, monkeypatch):
    cached = tmp_path / "models--owner--tiny"
    shutil.copytree(tiny_model_dir, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    named = make_engine("transformers", "owner/tiny", SETTINGS)
    assert asyncio.run(named.generate(REQUESTS, SAMPLING)) == engine.generate(REQUESTS, SAMPLING)


def test_bf16_logprobs_are_close_to_the_models(tiny_model_dir):
    engine = Engine(tiny_model_dir, replace(SETTINGS, dtype="bf16"))
    generations = engine.generate(REQUESTS, SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    assert largest_difference(model, REQUESTS, generations, SAMPLING.temperature) < 0.1
    engine.shutdown()


def test_the_same_requests_give_the_same_responses_again_and_in_a_new_engine(engine, tiny_model_dir):
    first = engine.generate(REQUESTS, SAMPLING)
    engine.generate(REQUESTS[:5], SamplingParams(3))
    assert engine.generate(REQUESTS, SAMPLING) == first
    other = Engine(tiny_model_dir)
    assert other.generate(REQUESTS, SAMPLING) == first
    other.shutdown()


def test_a_response_does_not_depend_on_its_batch_nor_on_the_batch_size(engine, tiny_model_dir):
    together = engine.generate(REQUESTS, SAMPLING)
    small = Engine(tiny_model_dir, replace(SETTINGS, max_num_seqs=4))
    for other in (
        [engine.generate([request], SAMPLING)[0] for request in REQUESTS],
        small.generate(REQUESTS, SAMPLING),
    ):
        assert [one.token_ids for one in other] == [one.token_ids for one in together]
        for one, whole in zip(other, together, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(whole.logprobs), atol=1e-4, rtol=0)
    small.shutdown()


def collected(engine):
    """Return {number: response} of the running batch."""
    found: dict[int, Generation] = {}
    is_last = False
    while not is_last:
        arrivals = engine.collect()
        assert not found.keys() & dict(arrivals.responses).keys()
        found |= arrivals.responses
        is_last = arrivals.is_last
    return found


def test_responses_that_are_collected_as_they_finish_are_those_of_the_batch(engine):
    engine.begin(REQUESTS, SAMPLING)
    found = collected(engine)
    assert [found[number] for number in range(18)] == engine.generate(REQUESTS, SAMPLING)
    assert collected(engine) == {}  # the batch has no further responses


def test_a_cut_gives_up_longer_responses_and_changes_no_other(engine, tiny_model_dir):
    sampled = [token for one in engine.generate(REQUESTS, SAMPLING) for token in one.token_ids]
    small = Engine(tiny_model_dir, replace(SETTINGS, max_num_seqs=4))
    # Frequent tokens, so that many responses end early.
    small.engine._eos = sorted(set(sampled), key=sampled.count)[-8:]
    whole = dict(enumerate(small.generate(REQUESTS, SAMPLING)))
    limit = sorted(len(one.token_ids) for one in whole.values())[9]
    assert limit < SAMPLING.max_new_tokens
    small.begin(REQUESTS, SAMPLING)
    small.cut(limit)
    found = collected(small)
    short = {number: one for number, one in whole.items() if len(one.token_ids) <= limit}
    # Longer responses may have finished before the engine received the limit.
    assert {number: one for number, one in found.items() if number in short} == short
    assert all(whole[number] == one for number, one in found.items())
    assert len(found) < len(whole)
    small.shutdown()


def test_an_error_of_a_batch_reaches_whom_collects(engine):
    engine.begin([GenerationRequest([10**9], 0)], SAMPLING)  # an invalid token
    with pytest.raises(IndexError):
        engine.collect()
    assert len(engine.generate(REQUESTS, SAMPLING)) == 18


def test_samples_of_a_prompt_differ_by_seed_and_agree_for_the_same_seed(engine):
    requests = [GenerationRequest(PROMPTS[0], seed) for seed in (1, 2, 3, 1)]
    first, second, third, again = engine.generate(requests, SAMPLING)
    assert len({tuple(one.token_ids) for one in (first, second, third)}) == 3
    assert again.token_ids == first.token_ids


def test_responses_end_with_any_end_token_of_the_generation_config(engine, tiny_model_dir):
    generations = engine.generate(REQUESTS, SAMPLING)
    sampled = [token for one in generations for token in one.token_ids]
    ends = sorted({max(set(sampled), key=sampled.count), *eos_token_ids(tiny_model_dir)})
    assert len(ends) == 2
    engine.engine._eos = ends
    try:
        stopped = engine.generate(REQUESTS, SAMPLING)
    finally:
        engine.engine._eos = eos_token_ids(tiny_model_dir)
    assert {one.finish_reason for one in stopped} == {"stop", "length"}
    for one, whole in zip(stopped, generations, strict=True):
        found = [index for index, token in enumerate(whole.token_ids) if token in ends]
        length = found[0] + 1 if found else SAMPLING.max_new_tokens
        assert one.token_ids == whole.token_ids[:length]
        assert one.finish_reason == ("stop" if found else "length")
        assert len(one.logprobs) == length


def test_responses_end_at_the_token_that_completes_a_stop_string(engine, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    whole = engine.generate(REQUESTS, SAMPLING)
    texts = (tokenizer.decode(one.token_ids) for one in whole)
    pairs = ([a + b for a, b in pairwise(text) if "\ufffd" not in a + b] for text in texts)
    stop = tuple(pair[len(pair) // 2] for pair in pairs if pair)  # from the middle of each response
    assert len(stop) > 9

    def found(token_ids):
        return any(text in tokenizer.decode(token_ids) for text in stop)

    for one, same in zip(engine.generate(REQUESTS, replace(SAMPLING, stop=stop)), whole, strict=True):
        length = len(same.token_ids)
        end = next((n for n in range(1, length + 1) if found(same.token_ids[:n])), length)
        assert one.token_ids == same.token_ids[:end]
        assert one.logprobs == pytest.approx(same.logprobs[:end], abs=1e-4)
        assert one.finish_reason == ("stop" if found(one.token_ids) else same.finish_reason)


def test_a_stop_string_completed_by_the_last_token_allowed_ends_the_response(engine, tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    (cut,) = engine.generate(REQUESTS[:1], SamplingParams(4))
    assert cut.finish_reason == "length"
    (ended,) = engine.generate(REQUESTS[:1], SamplingParams(4, stop=(tokenizer.decode(cut.token_ids),)))
    assert ended == replace(cut, finish_reason="stop")


def test_end_tokens_come_from_the_generation_config_then_from_the_config(tiny_model_dir, tmp_path):
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert eos_token_ids(path) == [4, 9]
    (path / "generation_config.json").write_text("{}")
    (path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(path) == [7]
    (path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert eos_token_ids(path) == [5]
    (path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no eos_token_id in"):
        eos_token_ids(path)


class Shapes:
    """Records the token shapes of all forward passes."""

    def __init__(self, model):
        self.seen = []
        self.handle = model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, module, args, kwargs):
        self.seen.append(tuple(kwargs["input_ids"].shape))

    def __enter__(self):
        return self.seen

    def __exit__(self, *error):
        self.handle.remove()


def test_each_distinct_prompt_is_prefilled_once(engine):
    with Shapes(engine.engine._model) as seen:
        engine.generate(REQUESTS, SamplingParams(2))
    assert seen == [(3, 6), (18, 1)]


def test_rows_that_ended_leave_the_batch(engine):
    everything = [*range(150)]  # about half of the vocabulary ends a response
    engine.engine._eos, kept = everything, engine.engine._eos
    try:
        with Shapes(engine.engine._model) as seen:
            engine.generate(REQUESTS, SAMPLING)
    finally:
        engine.engine._eos = kept
    rows = [shape[0] for shape in seen[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] <= 2 < rows[0]
    assert len(rows) < SAMPLING.max_new_tokens


def test_prompts_are_prefilled_in_bounded_passes(engine, tiny_model_dir):
    requests = [GenerationRequest([5 + index % 250] * 40 + [6 + index // 250], index) for index in range(420)]
    large = Engine(tiny_model_dir, replace(SETTINGS, max_num_seqs=500))
    with Shapes(large.engine._model) as seen:
        generations = large.generate(requests, SamplingParams(2))
    assert seen == [(399, 41), (21, 41), (420, 1)]
    alone = engine.generate(requests[410:411], SamplingParams(2))[0]
    assert alone.token_ids == generations[410].token_ids
    large.shutdown()


def test_greedy_responses_are_those_of_transformers_own_generate(engine, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    generations = engine.generate([GenerationRequest(prompt, 0) for prompt in PROMPTS], SamplingParams(12, greedy=True))
    for prompt, one in zip(PROMPTS, generations, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert one.token_ids == expected.tolist()


def test_a_repetition_penalty_counts_prompt_and_response_as_transformers_own_does(engine, tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    # Greedy responses of an untrained model repeat themselves, and finished rows leave the batch.
    engine.engine._eos, kept = [*range(20, 60)], engine.engine._eos
    sampling = SamplingParams(12, greedy=True, repetition_penalty=1.3)
    try:
        generations = engine.generate([GenerationRequest(PROMPTS[i % 3], 0) for i in range(6)], sampling)
    finally:
        engine.engine._eos = kept
    assert len({len(one.token_ids) for one in generations}) > 1
    for index, one in enumerate(generations):
        prompt = torch.tensor([PROMPTS[index % 3]])
        expected = model.generate(prompt, max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
        assert one.token_ids == expected[0, prompt.shape[1] :].tolist()[: len(one.token_ids)]
    plain = engine.generate([GenerationRequest(PROMPTS[0], 0)], SamplingParams(12, greedy=True))
    assert plain[0].token_ids != generations[0].token_ids


def test_no_requests_give_no_responses(engine):
    assert engine.generate([], SAMPLING) == []


def test_a_prompt_that_leaves_no_room_is_named_with_its_length(engine):
    with pytest.raises(UsageError, match=r"prompt 1 has 50 tokens; with max_new_tokens 20"):
        engine.generate([REQUESTS[0], GenerationRequest([5] * 50, 0)], SAMPLING)


def changed_model(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_llama_dir", "tiny_moe_dir"])
def test_after_a_push_the_engine_generates_with_the_new_weights(fixture, request, tmp_path):
    path = request.getfixturevalue(fixture)
    engines = [Engine(path), Engine(path)]
    model = changed_model(path)
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    before = engines[0].generate(REQUESTS, SAMPLING)
    assert largest_difference(model, REQUESTS, before, SAMPLING.temperature) > 0.5
    report = sender.send(as_in_checkpoint(model, model.named_parameters()), version=1)
    for engine in engines:
        engine.start_weight_update()
        engine.update_weights(report.manifest)
        engine.finish_weight_update(1)
    sender.close()
    after = engines[0].generate(REQUESTS, SAMPLING)
    assert largest_difference(model, REQUESTS, after, SAMPLING.temperature) < 1e-4
    assert engines[1].generate(REQUESTS, SAMPLING) == after
    assert ({one.weight_version for one in before}, {one.weight_version for one in after}) == ({0}, {1})
    assert engines[0].weight_checksum() == [report.checksum]
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_moe_dir"])
def test_before_a_push_the_checksum_is_that_of_the_initial_weights(fixture, request):
    path = Path(request.getfixturevalue(fixture))
    engine = Engine(str(path))
    assert engine.weight_checksum() == [weights_checksum(load_file(path / "model.safetensors").items())]
    engine.shutdown()


def push(engine, manifest, version):
    engine.start_weight_update()
    engine.update_weights(manifest)
    engine.finish_weight_update(version)


def test_a_push_with_a_missing_tensor_is_refused_and_leaves_the_weights(engine, tiny_model_dir, tmp_path):
    before = engine.generate(REQUESTS, SAMPLING)
    weights = dict(changed_model(tiny_model_dir).named_parameters())
    del weights["model.layers.1.mlp.up_proj.weight"]
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    manifest = sender.send(weights.items(), version=1).manifest
    with pytest.raises(RunError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        push(engine, manifest, 1)
    engine.finish_weight_update(0)
    assert engine.generate(REQUESTS, SAMPLING) == before
    sender.close()


def test_a_tied_head_may_be_part_of_a_push(tiny_model_dir, tmp_path):
    engine = Engine(tiny_model_dir)
    model = changed_model(tiny_model_dir)
    sender = WeightSender(ShmTransport(folders=(str(tmp_path),)))
    assert "lm_head.weight" in model.state_dict()
    push(engine, sender.send(model.state_dict().items(), version=1).manifest, 1)
    generations = engine.generate(REQUESTS, SAMPLING)
    assert largest_difference(model, REQUESTS, generations, SAMPLING.temperature) < 1e-4
    sender.close()
    engine.shutdown()


def test_nothing_is_generated_asleep_or_in_the_middle_of_an_update(engine):
    engine.sleep(2)
    assert engine.engine._asleep
    engine.wake(["weights"])
    with pytest.raises(RunError, match="asleep"):
        engine.generate(REQUESTS, SAMPLING)
    engine.wake(["kv_cache"])
    assert not engine.engine._asleep
    engine.start_weight_update()
    with pytest.raises(RunError, match="asleep or between"):
        engine.generate(REQUESTS, SAMPLING)
    engine.finish_weight_update(0)
    assert len(engine.generate(REQUESTS, SAMPLING)) == 18


def test_settings_that_need_vllm_are_refused_by_name(tiny_model_dir):
    with pytest.raises(UsageError, match="--vllm_sync_backend nccl requires vLLM"):
        TransformersEngine(tiny_model_dir, replace(SETTINGS, sync_backend="nccl"))
    with pytest.raises(UsageError, match="--vllm_tensor_parallel_size requires vLLM"):
        rollout_backend(EngineConfig(rollout_backend="transformers", vllm_tensor_parallel_size=2))
