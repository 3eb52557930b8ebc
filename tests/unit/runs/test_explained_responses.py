"""`rlhf why` for responses: which tokens of an update they are, and their shares of the gradient."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from samples import sample_of

from rlhf_cli.algorithms.gradient_share import Projection
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config.distillation import DistillationConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Branch, Episode, Generation
from rlhf_cli.options import build_config
from rlhf_cli.runs.online import explained
from rlhf_cli.runs.online.explained import Explained
from rlhf_cli.runs.online.replay import no_shares
from rlhf_cli.runs.online.why_student import divergence_lines
from rlhf_cli.trainers.online.samples import Rollout


def config(**given: str) -> GRPOConfig:
    values = {"pretrain": "model", "prompt_data": "data.jsonl", "reward_funcs": "exact", "output": "run"}
    return build_config(GRPOConfig, values | given)


PROMPT = Prompt([1, 2], "", None, "rows.jsonl", 0)


def batch() -> Any:
    """Return three responses: one of 2 tokens, a truncated one of 3, and an episode of 1 token after a branch of 2."""
    branch = Branch([1, 2], [3, 4], ((0, 2),))
    episode = Episode(((0, 1),), (0.0,), earlier=(branch,))
    found = [
        Generation([5, 6], [0.0] * 2, "stop", 0),
        Generation([5, 6, 7], [0.0] * 3, "length", 0),
        Generation([8], [0.0], "stop", 0, episode=episode),
    ]
    return SimpleNamespace(trainable=Rollout([sample_of(PROMPT, one, index=index) for index, one in enumerate(found)]))


def test_a_student_learns_from_responses_without_a_score():
    values = {"pretrain": "model", "teacher_pretrain": "t", "prompt_data": "data.jsonl", "output": "run"}
    sampled: Any = SimpleNamespace(sampled=batch().trainable)
    row = {"id": sampled.sampled.samples[1].id}
    found = explained.located(sampled, row, build_config(GKDConfig, values))
    assert found is not None
    assert found[1:] == (1, [(1, 0), (1, 1), (1, 2)])


def divergence(beta: float, top: int | None = None) -> list[str]:
    """Return the lines for s = (1/2, 1/2) and t = (1, 0) to three digits; the second token has no term."""
    student, teacher = math.log(0.5), math.log(1.0)
    terms = {0.0: math.log(2), 1.0: -math.log(2) / 2, 0.5: math.log(4 / 3) / 2 + math.log(2 / 3) / 4}
    values = {
        "divergence": terms[beta] + 0.25,
        "term_0": terms[beta],
        "term_0_student": student,
        "term_0_teacher": teacher,
    }
    settings = DistillationConfig(teacher_pretrain="t", beta=beta, teacher_top_k=top)
    return list(divergence_lines(settings, values, ["'a'"]))


def test_the_divergence_of_a_token_is_filled_in():
    """KL(t | s) = log 2 for the token; what remains of the divergence is 0.25."""
    assert divergence(0.0)[2:5] == [
        "  'a': 1 log(1 / 0.5) = 0.693147",
        "  all remaining terms 0.25",
        "D = 0.943147",
    ]
    assert divergence(0.0)[0] == "D = KL(t | s) = sum t log(t / s)"
    assert divergence(1.0)[2] == "  'a': 0.5 log(0.5 / 1) = -0.346574"
    assert "KL(s | t)" in divergence(1.0, 8)[0]
    assert "beta 1, t teacher, s student, over the 8 top tokens of the teacher" in divergence(1.0, 8)[1]
    assert divergence(0.5)[2] == "  'a': 0.5 x 1 log(1 / 0.75) + 0.5 x 0.5 log(0.5 / 0.75) = 0.0424748"


EXPECTED = [
    (0, False, [(0, 0), (0, 1)]),
    (1, False, [(1, 0), (1, 1), (1, 2)]),
    (2, False, [(2, 0), (2, 1), (3, 0)]),
    (1, True, []),
    (2, True, [(1, 0), (1, 1), (2, 0)]),
]


@pytest.mark.parametrize(("number", "is_masked", "places"), EXPECTED)
def test_the_tokens_of_a_response_are_found_in_the_update(number, is_masked, places):
    row = {"id": batch().trainable.samples[number].id}
    found = explained.located(batch(), row, config(mask_truncated=str(is_masked).lower()))
    assert found is not None
    assert found[1:] == (number, places)


def test_a_response_that_was_not_trained_on_has_no_tokens():
    assert explained.located(batch(), {"id": "rows.jsonl:9/0.0@0"}, config()) is None


@pytest.mark.parametrize(
    ("token", "file", "most", "tokens"),
    [(None, None, 64, []), (1, None, 64, [(1, 1)]), (9, None, 64, []), (1, "f", 64, "all"), (1, "f", 2, [(1, 1)])],
)
def test_one_token_or_all_of_a_short_response_have_shares(token, file, most, tokens, monkeypatch):
    monkeypatch.setattr(explained, "MOST_SHARES", most)
    row = {"id": batch().trainable.samples[1].id}
    settings = WhyGroup(run="run", sample="", token=token, json_file=file)
    found = explained.tokens_with_share(row, settings, config(), batch())
    assert found == ([(1, 0), (1, 1), (1, 2)] if tokens == "all" else tokens)


def share(found: dict[Any, Projection], reason: str | None = None) -> list[str]:
    again = SimpleNamespace(no_shares=reason, projections=[found])
    return explained.share_lines(Explained(cast("Any", again), batch().trainable, 0, [(0, 0), (0, 1)]), 1, 1)


def test_the_formula_of_a_share_has_its_numbers():
    """g_t . g = 31 and |g|^2 = 41 as for g_t = (3, 4) and g = (5, 4): 31 / 41 and cosine 31 / (5 sqrt 41)."""
    norms, formula = share({(0, 1): Projection(31.0, 5.0, math.sqrt(41))})
    assert "norm 5;" in norms
    assert norms.endswith("norm 6.40312; cosine 0.968277")
    assert formula == "share of the gradient norm: g_t . g / |g|^2 = 31 / 41 = 75.6098%"


def test_a_share_that_is_not_computed_is_explained():
    assert share({}, "with dropout") == ["share of the gradient norm: not computed: with dropout"]
    assert share({})[0].endswith("not computed for all of more than 64 tokens: set --token 1")
    assert share({(0, 1): Projection(0.0, 0.0, 0.0)})[0].endswith("the gradient of the step has norm 0")
    assert share({(0, 1): Projection(math.nan, 1.0, math.nan)})[0].endswith("the gradient of the step has norm nan")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"zero_stage": "3"}, "zero_stage 3"),
        ({"sequence_parallel_size": "2"}, "share sequences or layers"),
        ({"lora_rank": "4", "lora_dropout": "0.1"}, "dropout"),
    ],
)
def test_settings_without_shares_are_named(given, reason):
    found = no_shares(config(**given))
    assert (found is None) if reason is None else (reason in str(found))


def test_an_episode_is_shown_by_turns_with_their_rewards():
    messages = [("assistant", "130"), ("user", "3 letters"), ("assistant", "40")]
    row = {
        "prompt": "43+91=",
        "response": "40",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "turn_rewards": [0.0, 2.0],
    }
    assert list(explained.response_lines(row)) == [
        "  prompt    '43+91='",
        "  assistant '130'  reward 0",
        "  user      '3 letters'",
        "  assistant '40'  reward 2",
    ]
    assert list(explained.response_lines({"prompt": "1+1=", "response": "2"}))[1] == "  response  '2'"
