"""Format, length and choice rewards, compared with manual calculations, and the table of rewards."""

import inspect
import math

import pytest

from rlhf_cli.config.rewards import REWARDS, RewardCall, read_call, read_calls
from rlhf_cli.rewards.format_rewards import has_format, reasoning_steps, repetition_penalty, tag_count
from rlhf_cli.rewards.length_rewards import length, soft_overlong
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.verifiers.choices import multiple_choice
from rlhf_cli.rewards.workers.functions import resolve


def request(num_tokens: int) -> ScoreRequest:
    return ScoreRequest("", "", "", None, num_tokens=num_tokens, truncated=False, group="g", sample=0, group_size=1)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>\na\n\nb</think>\n\n<answer>\nb\n</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a < b, c > d</think><answer><b></answer>", 1.0),
        ("<think>a</think><answer>b</answer> after", 0.0),
        ("before <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> between <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<answer>b</answer>", 0.0),
        ("", 0.0),
        ("<think>" * 100_000, 0.0),
    ],
)
def test_format_is_thought_and_answer_and_nothing_else(response: str, value: float) -> None:
    assert has_format(response) == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a</think><answer>b", 0.75),
        ("<think><think>a</think><answer>b</answer>", 0.75),
        ("</answer>", 0.25),
        ("nothing", 0.0),
    ],
)
def test_each_tag_that_is_there_once_counts_a_quarter(response: str, value: float) -> None:
    assert tag_count(response) == value


@pytest.mark.parametrize(
    ("response", "marks"),
    [
        ("Step 1: add\nStep 2: subtract", 2),
        ("1. add\n2. subtract", 2),
        ("- add\n  * subtract", 2),
        ("First, add. Second, subtract.", 2),
        ("Next, add.\nFinally, subtract", 2),
        ("a 1. b - c * d, first, -1", 0),
        ("1. a\n2. b\n3. c\n4. d", 3),
        ("", 0),
    ],
)
def test_three_marks_of_steps_are_enough(response: str, marks: int) -> None:
    assert reasoning_steps(response) == marks / 3


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("a b c d", 0.0),
        ("a b c a b c", -0.1 * (1 - 3 / 4)),  # abc bca cab abc
        ("A b c a B C", -0.1 * (1 - 3 / 4)),
        ("a a a a a", -0.1 * (1 - 1 / 3)),
        ("a a", 0.0),
        ("", 0.0),
    ],
)
def test_repeated_trigrams_are_punished_by_their_share(response: str, value: float) -> None:
    assert repetition_penalty(response, n=3, max_penalty=-0.1) == pytest.approx(value)


def test_the_length_of_ngrams_and_the_penalty_are_parameters() -> None:
    reward = resolve(read_call("repetition_penalty(n=1, max_penalty=-1)"))
    assert reward("a a b a") == -0.5


@pytest.mark.parametrize(
    ("tokens", "correct", "value"),
    [
        (0, True, 1.0),
        (500, True, 0.9),
        (250, True, 0.8 + 0.2 * (1 + math.sqrt(0.5)) / 2),
        (1000, True, 0.8),
        (5000, True, 0.8),
        (0, False, -0.5),
        (500, False, -0.3),
        (1000, False, -0.1),
    ],
)
def test_cosine_prefers_short_right_and_long_wrong_answers(tokens: int, correct: bool, value: float) -> None:
    assert resolve(read_call("cosine"))(request(tokens), correct) == pytest.approx(value)
    assert resolve(read_call("cosine(max_len=2000)"))(request(2 * tokens), correct) == pytest.approx(value)


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (200, -1)])
def test_soft_overlong_falls_in_a_line_over_the_buffer(tokens: int, value: float) -> None:
    assert soft_overlong(request(tokens), None, max_len=100, buffer=20, factor=1.0) == value
    assert soft_overlong(request(tokens), None, max_len=100, buffer=20, factor=0.5) == value / 2


def test_length_compares_the_responses_of_a_group() -> None:
    requests = [request(tokens) for tokens in (100, 200, 300, 150, 300)]
    assert length(requests, [True, True, True, False, False]) == [0.5, 0.0, -0.5, 0.0, -0.5]
    assert length([request(7), request(7)], [True, False]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "status", "choice"),
    [
        ("B", "correct", "B"),
        ("(b)", "invalid", None),
        (r"so \boxed{b}", "correct", "B"),
        (r"\boxed{\text{(B)}}", "correct", "B"),
        ("<answer>B. Because it is</answer>", "correct", "B"),
        ("<answer>the answer is (B)</answer>", "correct", "B"),
        ("Option A is wrong, so the answer is (B).", "correct", "B"),
        ("**Answer:** B", "correct", "B"),
        ("Because.\n\n**C**\n", "wrong", "C"),
        ("B) five", "correct", "B"),
        ("The answer is C, not B", "wrong", "C"),
        ("The answer is E", "invalid", None),
        ("A nice day", "invalid", None),
        (r"\boxed{5}", "invalid", None),
        ("", "invalid", None),
    ],
)
def test_multiple_choice_takes_the_letter_that_is_chosen(response: str, status: str, choice: str | None) -> None:
    for label in ("B", "(b)", "B. five"):
        verdict = multiple_choice(response, label, choices=4)
        assert (verdict.status, verdict.answer) == (status, choice)


def test_multiple_choice_needs_a_letter_for_a_label() -> None:
    assert multiple_choice("B", None, choices=4).status == "failed"
    assert "is not one of the letters A to D" in multiple_choice("B", "E", choices=4).detail
    assert multiple_choice("E", "E", choices=5).status == "correct"


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("format", {}),
        ("format()", {}),
        (" repetition_penalty ( n = 4 ) ", {"n": 4, "max_penalty": -0.1}),
        ("soft_overlong(max_len=100,buffer=20)", {"max_len": 100, "buffer": 20, "factor": 1.0}),
    ],
)
def test_calls_have_a_value_for_every_parameter(text: str, parameters: dict[str, float]) -> None:
    assert read_call(text) == RewardCall(text.split("(")[0].strip(), parameters)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["gsm9k"],
            r"there is no reward 'gsm9k' \(did you mean gsm8k\?\): gsm8k, exact, .*or file",
        ),
        (["accuracy"], r"there is no reward 'accuracy' \(it is math here\): gsm8k"),
        (["accuracy_reward"], r"there is no reward 'accuracy_reward' \(it is math here\)"),
        (["cosine(maxlen=3)"], r"cosine has no parameter 'maxlen' \(did you mean max_len\?\): it takes max_len, corr"),
        (["exact(n=3)"], "exact has no parameter 'n': it takes none"),
        (["cosine(max_len=long)"], "max_len of cosine must be an integer >= 1, not 'long'"),
        (["cosine(max_len=2.5)"], "max_len of cosine must be an integer >= 1, not '2.5'"),
        (["cosine(max_len=0)"], "max_len of cosine must be an integer >= 1, not '0'"),
        (["cosine(max_len)"], "max_len of cosine must be an integer >= 1, not ''"),
        (["cosine(wrong_long=nan)"], "wrong_long of cosine must be a number, not 'nan'"),
        (["soft_overlong(max_len=3, max_len=4)"], "soft_overlong is given max_len twice"),
        (["soft_overlong(max_len=3)"], r"soft_overlong needs a value for buffer: soft_overlong\(buffer=\.\.\.\)"),
        (["cosine(max_len=3"], r"'cosine\(max_len=3' is not NAME or NAME\(PARAMETER=NUMBER, \.\.\.\); in a YAML file"),
        (["exact", "exact()"], "a reward is listed twice: exact exact; use a weight instead"),
        (["cosine", "format"], "cosine depends on whether an answer is right: name a verifier too .gsm8k, exact, "),
        (["length"], "length depends on whether an answer is right"),
    ],
)
def test_wrong_calls_are_refused_in_one_sentence(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_calls(texts)


@pytest.mark.parametrize("name", REWARDS)
def test_every_row_names_a_function_that_takes_its_parameters(name: str) -> None:
    row = REWARDS[name]
    given = {key: 1 if parameter.default is None else parameter.default for key, parameter in row.parameters.items()}
    signature = inspect.signature(resolve(RewardCall(name, given)).func)  # type: ignore[attr-defined]
    keywords = {key for key, value in signature.parameters.items() if value.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords - {"call"} == {*row.parameters, *row.settings}
    arguments = {"verifier": 2, "text": 1, "length": 2, "group": 2, "episode": 1}[row.kind]
    assert len(signature.parameters) - len(keywords) == arguments
    assert all(type(parameter.default) in (parameter.kind, type(None)) for parameter in row.parameters.values())
