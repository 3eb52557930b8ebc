"""Responses that an engine's process decodes and sends as arrays: the same samples, rows, sequences and checkpoints."""

import asyncio
import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
from online_settings import online_settings, resolve
from samples import sample_of

from rlhf_cli.backends.roles.serialization import PickledCall
from rlhf_cli.backends.rollout.engine import Arrivals
from rlhf_cli.backends.rollout.engine_host import EngineHost
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation, SamplingParams
from rlhf_cli.runs.online.group_files import load_surplus, save_surplus
from rlhf_cli.trainers.online.rollout import score_request, text_of_response
from rlhf_cli.trainers.online.sample_rows import iteration_rows
from rlhf_cli.trainers.online.samples import Rollout

PROMPT = Prompt([7, 8], "2+3=", "5", "sums.jsonl", 16)
PLAIN = Generation([4, 5, 2], np.array([-0.1, -1 / 3, -1e-17], np.float32).tolist(), "stop", 12)


def decode(token_ids):
    assert isinstance(token_ids, list)
    return "-".join(map(str, token_ids))


def sent(response: Generation) -> Generation:
    """Return a response as the driver receives it."""

    async def collect() -> Arrivals:
        return Arrivals([(0, response)], is_last=True)

    async def begin(requests: object, sampling: object) -> None:
        pass

    engine: Any = SimpleNamespace(collect=collect, begin=begin)
    arrivals = asyncio.run(EngineHost(engine, decode).begin(1, [], SamplingParams(1), None))
    return pickle.loads(pickle.dumps(arrivals)).responses[0][1]


def samples(response: Generation, text: str = "4-5-2"):
    return [sample_of(PROMPT, response, index=index, text=text) for index in range(2)]


def test_the_engine_sends_text_and_arrays_that_hold_the_same_values():
    found = sent(PLAIN)
    assert found.text == "4-5-2"
    assert found.token_ids == array("i", PLAIN.token_ids)
    assert found.logprobs == array("f", PLAIN.logprobs)
    assert (found.num_sampled, found.turns, found.longest) == (3, ((0, 3),), 3)
    assert len(pickle.dumps(sent(Generation([100_000] * 1000, [-0.1] * 1000, "stop", 0)).logprobs)) < 4200


def test_the_driver_does_not_decode_what_the_engine_has_decoded():
    def fail(_):
        raise AssertionError

    assert text_of_response(sent(PLAIN), fail) == "4-5-2"
    assert text_of_response(PLAIN, decode) == "4-5-2"


def test_sequences_rows_and_checkpoints_are_the_same_bits(tmp_path):
    plain, received = Rollout(samples(PLAIN)), Rollout(samples(sent(PLAIN)))
    for one, other in zip(plain.sequences, received.sequences, strict=True):
        assert one.token_ids.dtype == other.token_ids.dtype == np.int32
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
    assert [np.asarray(a).tobytes() for a in plain.rollout_logprobs] == [
        np.asarray(a).tobytes() for a in received.rollout_logprobs
    ]
    settings = online_settings(resolve("grpo", n_samples_per_prompt=2), "grpo")
    rows = [iteration_rows(rollout.samples, rollout, settings) for rollout in (plain, received)]
    assert rows[0] == rows[1]
    save_surplus(tmp_path, [list(received.samples)])
    assert load_surplus(tmp_path, lambda place: PROMPT) == [samples(PLAIN)]


def test_the_sum_of_a_row_is_that_of_additions_from_left_to_right():
    logprobs = np.random.default_rng(0).uniform(-9, 0, 10_001).tolist()
    (row,) = iteration_rows(
        [sample_of(PROMPT, Generation([1] * len(logprobs), logprobs, "stop", 0))],
        Rollout([]),
        online_settings(resolve("grpo"), "grpo"),
    )
    assert row["rollout_logprob"] == round(sum(logprobs), 6)
    (empty,) = iteration_rows(
        [sample_of(PROMPT, Generation([], [], "stop", 0))], Rollout([]), online_settings(resolve("grpo"), "grpo")
    )
    assert empty["rollout_logprob"] == 0.0


def test_user_rewards_get_the_tokens():
    request = score_request(PROMPT, sent(PLAIN), "4-5-2", group="0", index=0, size=2)
    assert list(request.token_ids) == [4, 5, 2]


def test_a_pickled_call_arrives_as_the_function_with_its_values():
    version = 7
    call = PickledCall(lambda number: number + version)
    arrived = pickle.loads(pickle.dumps(call))
    assert (call(1), arrived(1)) == (8, 8)
    assert not isinstance(arrived, PickledCall)
