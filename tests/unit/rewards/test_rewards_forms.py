"""Reward files with the signatures of other tools, in real worker processes."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scoring import WriteFile, config, score

from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import picture_of_pixels
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.reward_check import check_rewards
from rlhf_cli.trainers.online.groups import usefulness
from rlhf_cli.trainers.online.metrics import rollout_rewards

pytestmark = pytest.mark.usefixtures("no_process_is_left")

COLUMNS = {
    "prompt": "What is 9 + 9?",
    "answer": "18",
    "level": 3,
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"index": 7},
}


def row(prompt: Any = "What is 9 + 9?") -> str:
    return json.dumps({"prompt": prompt, "columns": COLUMNS})


def group(*responses: str, prompt: Any = "What is 9 + 9?", cut: bool = False) -> list[ScoreRequest]:
    return [
        ScoreRequest(
            query=f"<user>What is 9 + 9?{response}",
            prompt="<user>What is 9 + 9?",
            response=response,
            label="18",
            num_tokens=len(response),
            truncated=cut,
            group="0",
            sample=sample,
            group_size=len(responses),
            source="openai/gsm8k",
            row=row(prompt),
            token_ids=[ord(letter) for letter in response],
        )
        for sample, response in enumerate(responses)
    ]


def scores(path: str, requests: list[ScoreRequest], **settings: Any) -> list[Score]:
    with Scorer(config(reward_func=path, reward_max_failures=1.0, **settings), decode=lambda ids: f"{ids}<end>") as one:
        return one.score(requests)


OPENRLHF = """
    import numpy

    def reward_func(queries, prompts, labels, **kwargs):
        texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
        right = numpy.array([float(text == label) for text, label in zip(texts, labels)])
        return {"rewards": right - 0.5, "scores": right, "extra_logs": {"accuracy": right.mean(), "right": right}}
"""
TRL = """
    def reward_func(completions, answer, level, **kwargs):
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        assert all("trainer_state" not in kwargs and len(kwargs["completion_ids"]) == len(texts) for _ in texts)
        kwargs["log_metric"]("exact", 0.25)
        return [None if text == "?" else level[0] * float(text == right) for text, right in zip(texts, answer)]
"""
VERL = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info["index"]) == ("openai/gsm8k", 7)
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}
"""
VERL_ASYNC = VERL.replace("def compute", "async def compute")
VERL_BATCH = """
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        return [1.0 if text == truth else -1.0 for text, truth in zip(solution_strs, ground_truths)]
"""
EASYR1 = """
    def compute_score(reward_inputs, format_weight=0.1):
        return [
            {"overall": float(one["response"] == one["ground_truth"]) + format_weight, "length": one["response_length"]}
            for one in reward_inputs
        ]
"""


def test_openrlhfs_dict_gives_rewards_scores_to_filter_by_and_metrics(reward_file: WriteFile) -> None:
    found = scores(reward_file(OPENRLHF), group("18", "19"))
    assert [(one.value, one.filter) for one in found] == [(0.5, 1.0), (-0.5, 0.0)]
    assert found[0].metrics == {"reward_func/accuracy": 0.5, "reward_func/right": 1.0}
    assert rollout_rewards(found)["reward_func/right"] == 0.5


def test_a_dict_of_lists_counts_like_a_list_of_dicts(reward_file: WriteFile) -> None:
    columns = """
        def reward_func(queries, prompts, labels):
            return {"overall": [1.5, None], "score": [1.0, 0.0], "format": [0.0, 1.0], "temperature": 0.5}
    """
    found = scores(reward_file(columns), group("18", "19"))
    assert [(one.value, one.status) for one in found] == [(1.5, "scored"), (None, "failed")]
    assert found[0].filter == 1.0
    assert found[0].metrics == {"reward_func/score": 1.0, "reward_func/format": 0.0, "reward_func/temperature": 0.5}


def test_dynamic_filtering_looks_at_the_scores_in_place_of_the_rewards() -> None:
    ranged = DynamicSamplingConfig(dynamic_filtering=True, dynamic_filtering_reward_range=(0.2, 0.8))
    alike = [Score(3.0, "scored", filter=0.0), Score(3.0, "scored", filter=1.0)]
    assert usefulness(alike, ranged) == "useful"
    assert usefulness(alike, DynamicSamplingConfig(dynamic_filtering=True)) == "useful"


@pytest.mark.parametrize("prompt", ["What is 9 + 9?", [{"role": "user", "content": "What is 9 + 9?"}]])
def test_trls_functions_get_columns_and_completions_like_their_prompts(reward_file: WriteFile, prompt: Any) -> None:
    found = scores(reward_file(TRL), group("18", "19", "?", prompt=prompt))
    assert [one.value for one in found] == [3.0, 0.0, None]
    assert found[0].metrics == {"reward_func/exact": 0.25}
    assert (found[2].status, found[2].detail) == ("failed", "reward_func returned None")


@pytest.mark.parametrize("source", [VERL, VERL_ASYNC], ids=["plain", "async"])
def test_verls_functions_are_called_once_for_each_response(reward_file: WriteFile, source: str) -> None:
    found = scores(reward_file(source), group("18", "19"))
    assert [one.value for one in found] == [1.0, -1.0]
    assert found[0].metrics == {"reward_func/acc": 1.0}


def test_verls_functions_of_a_batch_get_lists(reward_file: WriteFile) -> None:
    assert [one.value for one in scores(reward_file(VERL_BATCH), group("18", "19"))] == [1.0, -1.0]


def test_easyr1s_functions_get_dicts_and_their_parameters(reward_file: WriteFile) -> None:
    found = scores(reward_file(EASYR1), group("18", "1"), reward_func_args='{"format_weight": 0.5}')
    assert [one.value for one in found] == [1.5, 0.5]
    assert found[1].metrics == {"reward_func/length": 1.0}


def test_a_function_gets_what_its_parameters_name(reward_file: WriteFile) -> None:
    path = reward_file("""
        def reward_func(responses, finish_reasons, token_ids, raw_responses, extra_info, *, bonus):
            assert finish_reasons == ["length"] and token_ids == [[49]] and raw_responses == ["[49]<end>"]
            return [bonus + extra_info[0]["index"]]
    """)
    (found,) = scores(path, group("1", cut=True), reward_func_args={"bonus": 0.5})
    assert found.value == 7.5


@pytest.mark.parametrize("texts", ["responses", "completions"])
def test_a_function_that_names_images_gets_the_pictures_of_each_response(reward_file: WriteFile, texts: str) -> None:
    path = reward_file(f"""
        def reward_func({texts}, images, **others):
            assert all(image.size == (3, 2) for own in images for image in own)
            return [100.0 * len(own) + sum(image.getpixel((2, 1))[0] for image in own) for own in images]
    """)
    dark, bright = (np.full((2, 3, 3), shade, dtype=np.uint8) for shade in (5, 250))
    pictures = (picture_of_pixels("dark", dark), picture_of_pixels("bright", bright))
    requests = [replace(one, pictures=pictures) for one in group("a", "b")]
    text_alone = [replace(one, group="1") for one in group("a", "b")]
    assert [one.value for one in scores(path, requests + text_alone)] == [455.0, 455.0, 0.0, 0.0]


def test_another_function_of_a_file_is_named_behind_a_colon(reward_file: WriteFile) -> None:
    path = reward_file("def mine(q, p, l): return [2.0] * len(q)\ndef reward_func(q, p, l): return [1.0] * len(q)")
    assert [scores(name, group("a"))[0].value for name in (path, f"{path}:mine")] == [1.0, 2.0]
    with pytest.raises(UsageError, match=r"has no function other; it defines mine, reward_func"):
        scores(f"{path}:other", group("a"))


@pytest.mark.parametrize(
    ("source", "name"), [(TRL, "TRL"), (VERL, "verl"), (EASYR1, "EasyR1"), (OPENRLHF, "")], ids=["t", "v", "e", "o"]
)
def test_the_form_is_named_in_a_line(reward_file: WriteFile, source: str, name: str) -> None:
    with Scorer(config(reward_func=reward_file(source))) as scorer:
        assert (f"is called as {name} calls it" in scorer.form) == bool(name)


@pytest.mark.parametrize("parameters", ["environments, **kwargs", "completions, environments, **kwargs"])
def test_a_function_that_reads_trls_environments_is_refused_with_the_reward_to_name(
    reward_file: WriteFile, parameters: str
) -> None:
    source = f"def reward_func({parameters}): return [one.reward for one in environments]"
    with pytest.raises(UsageError, match=r"`environments` parameter.*--reward_funcs environment"):
        Scorer(config(reward_func=reward_file(source))).__enter__()


PROMPTS = [Prompt([5, 6], "<user>What?", "18", "rows.jsonl", place, "openai/gsm8k", row()) for place in range(3)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(queries, prompts, labels): return 1.0", "returned float, not a list of numbers"),
        ("(queries, prompts, labels): return ['1'] * len(queries)", "returned str '1', not a number"),
        ("(queries, prompts, labels): return {'value': 1}", "returned a dict with keys value, without rewards"),
        ("(queries, prompts, labels): return [1.0] * 9", "returned 9 values for 2 responses"),
        ("(completions, solution): return [1.0] * 2", "requires 'solution', which is neither a row column nor in"),
        ("(completions): return [c[0]['content'] for c in completions]", "message lists if it is a message list"),
        ("(queries, prompts, labels): return lengths(queries)", "raised NameError: name 'lengths' is not defined"),
    ],
)
def test_a_trial_call_refuses_what_would_be_wrong_of_any_response(
    reward_file: WriteFile, body: str, message: str
) -> None:
    with pytest.raises(UsageError, match="a test call with a made-up response") as caught:
        check_rewards(config(reward_func=reward_file(f"def reward_func{body}")), PROMPTS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "import re\ndef reward_func(q, p, l): return [float(re.search('x(.)', one).group(1)) for one in q]",
        "def reward_func(q, p, l): return [int(one) for one in q]",
    ],
    ids=["no match", "no number"],
)
def test_an_exception_that_may_be_of_the_made_up_text_is_a_warning(
    reward_file: WriteFile, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    check_rewards(config(reward_func=reward_file(body)), PROMPTS)
    assert "such a reward counts as failed" in capsys.readouterr().err


def test_a_sound_reward_file_passes_its_trial_in_silence(
    reward_file: WriteFile, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("1.0", "None", "float('nan')"):
        check_rewards(config(reward_func=reward_file(f"def reward_func(q, p, l): return [{value}] * len(q)")), PROMPTS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "source",
    [
        "def reward_func(messages, answer, **columns): return [float(len(turns)) for turns in messages]",
        "def reward_func(queries, messages): return [float(len(turns)) for turns in messages]",
        "def reward_func(completions, **columns): return [float(len(c[-1]['content'])) for c in completions]",
    ],
    ids=["messages", "queries", "completions"],
)
def test_a_trial_call_of_an_episode_has_messages(
    reward_file: WriteFile, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    check_rewards(config(reward_func=reward_file(source)), PROMPTS, is_episode=True)
    assert "test call" not in capsys.readouterr().err
    if "completions" not in source:
        with pytest.raises(UsageError, match="requires 'messages'"):
            check_rewards(config(reward_func=reward_file(source)), PROMPTS)


def test_parameters_that_a_function_does_not_take_are_refused(reward_file: WriteFile) -> None:
    with pytest.raises(UsageError, match=r"has no parameter 'weight' \(--reward_func_args\)"):
        scores(reward_file(EASYR1), group("18"), reward_func_args='{"weight": 1}')
    with pytest.raises(ValueError, match="must be a JSON object"):
        config(reward_func="x.py", reward_func_args="[1]")


MIXED = [
    Prompt([1], "p", "18", "rows.jsonl", 0, "openai/gsm8k"),
    Prompt([1], "p", '["18", "9 + 9"]', "rows.jsonl", 1, "train-math-deepscaler"),
    Prompt([1], "p", json.dumps({"assert_case": ["assert f(1) == 2"]}), "rows.jsonl", 2, "mine"),
]
OWN = {"reward_funcs": ["by_row"], "reward_by_source": {"mine": "code(timeout=2)"}}


def judged(prompt: Prompt, response: str, **settings: Any) -> Score:
    asked = ScoreRequest("", "", response, prompt.label, 1, False, "g", 0, 1, prompt.data_source)
    with Scorer(config(**OWN | settings)) as scorer:
        return scorer.score([asked])[0]


def test_each_row_is_judged_by_the_verifier_of_its_source() -> None:
    assert judged(MIXED[0], "#### 18").status == "correct"
    assert judged(MIXED[0], r"\boxed{18}").status == "invalid"
    found = judged(MIXED[1], r"\boxed{9 + 9}")
    assert (found.status, found.metrics, found.parts) == ("correct", {"by_row/math": 1.0}, {"by_row": 1.0})


def test_sources_without_a_verifier_are_refused_with_their_count_and_the_cure() -> None:
    with pytest.raises(UsageError) as caught:
        check_rewards(config(reward_funcs=["by_row"]), [*MIXED[:2], MIXED[2], MIXED[2]])
    assert "no verifier for mine (2 rows) in column 'data_source'" in str(caught.value)
    assert """--reward_by_source '{"mine": "math"}'""" in str(caught.value)
    with pytest.raises(UsageError, match=r"1 of 2 rows have no text in column 'data_source'.* --reward_key"):
        check_rewards(config(reward_funcs=["by_row"]), [MIXED[0], Prompt([1], "p", "1", "rows.jsonl", 0)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": ["by_row"], "reward_by_source": {"a": "maths"}}, "a: there is no reward 'maths'"),
        ({"reward_funcs": ["by_row"], "reward_by_source": {"a": "format"}}, "a: format is no verifier of a row"),
    ],
)
def test_mappings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_score_of_every_reward_still_has_the_fields_it_had(reward_file: WriteFile) -> None:
    (found,) = score(config(reward_func=reward_file("def reward_func(q, p, l): return [1.0]")), "a")
    assert found == Score(1.0, "scored", "", {"reward_func": 1.0})
