"""The code reward: code blocks in answers, test formats, and the share of passed tests."""

import json
from functools import partial

import pytest
from pydantic import ValidationError

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.sandbox import run as sandbox
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.verifiers.code import CodeLimits, grade, last_code_block, same_output, same_value
from rlhf_cli.rewards.verifiers.code_tests import AssertTests, FunctionTests, StdinTests, parse_tests

LIMITS = CodeLimits(timeout=30.0, memory_mb=200, total_seconds=120.0)
OF_HANGING = CodeLimits(timeout=2.0, memory_mb=200, total_seconds=60.0)
HANGS = "__import__('time').sleep(60)"  # without using CPU time of parallel tests; one test below does


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\none\n```\nbetter:\n```py\ntwo\n```", "two\n"),
        ("```\nbare\n```", "bare\n"),
        ("```python\ncode\n```\nIt prints\n```\n3\n```", "code\n"),
        ("```python\ncode\n```\n```text\n3\n```\n```js\nx\n```", "code\n"),
        ("   ```Python title=a\n  code\n   ```", "  code\n"),
        ("````python\ntext = '''\n```\n'''\n````", "text = '''\n```\n'''\n"),
        ("```python\nwhole\n```\n```python\ncut off", "whole\n"),
        ("```python\ncut off", None),
        ("`code`", None),
        ("```code``` in a line", None),
        ("", None),
        ("```python\n```", ""),
    ],
)
def test_the_last_block_of_python_is_the_answer(text, code):
    assert last_code_block(text) == code


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1   2  \r\n3  \n\n", "\n1 2\n3", True),
        ("1\n2 3", "1 2\n3", False),
        ("1.0", "1", False),
        ("0.30000000000000004", "0.3", False),
        ("yes", "Yes", False),
        ("", "", True),
        ("1\n\n2", "1\n2", False),
    ],
)
def test_output_is_compared_by_words_in_lines(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, [2, "x"]], [1, [2, "x"]], True),
        (2, 2.0, True),
        (True, 1, False),
        ([0], [False], False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (0.1 + 0.2, 0.3, False),
        (None, 0, False),
        ("1", 1, False),
    ],
)
def test_values_are_compared_by_equality(value, expected, same):
    assert same_value(value, expected) is same


@pytest.mark.parametrize(
    ("label", "tests"),
    [
        ({"inputs": ["1\n", ["a", "b"]], "outputs": ["2", "c"]}, StdinTests(("1\n", "a\nb"), ("2", "c"))),
        (
            {"fn_name": "f", "inputs": [[1, [2]], "3\n\"x\""], "outputs": [[4], "[5]"]},
            FunctionTests("f", ([1, [2]], [3, "x"]), ([4], [5])),
        ),
        (["assert f(1) == 2", "assert f(2) == 3"], AssertTests(("assert f(1) == 2", "assert f(2) == 3"), (0, 1))),
        ("import math\nassert f(1); assert f(2)", AssertTests(("import math", "assert f(1)", "assert f(2)"), (1, 2))),
        ("def check(f):\n    assert f(1)\ncheck(g)", AssertTests(("def check(f):\n    assert f(1)", "check(g)"), (1,))),
    ],
)  # fmt: skip
def test_labels_are_read(label, tests):
    assert parse_tests(label if isinstance(label, str) else json.dumps(label)) == tests


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ('{"inputs": ["1"], "outputs": []}', "has 1 inputs and 0 outputs"),
        ('{"inputs": [], "outputs": []}', "has no tests: 'inputs' is empty"),
        ('{"input": ["1"]}', "has no lists 'inputs' and 'outputs'; keys: 'input'"),
        ('{"inputs": [1], "outputs": ["2"]}', "has a test that is not text: 1"),
        (
            '{"fn_name": "f", "inputs": ["x"], "outputs": ["2"]}',
            "has arguments or a value for f that are not JSON: 'x'",
        ),
        (
            '{"fn_name": "a b", "inputs": [[1]], "outputs": [2]}',
            "has fn_name 'a b', which is not a valid function name",
        ),
        ("[]", "has no tests: it is an empty list"),
        ("42", "is neither"),
        ("the answer", "is neither JSON nor valid Python (invalid syntax): 'the answer'"),
        ("x = 1", "has no assertions: 'x = 1'"),
        ("", "has no tests: it is empty"),
        ('["assert f("]', "is neither JSON nor valid Python"),
        ("[" * 100_000, "is neither JSON nor valid Python"),
    ],
)
def test_labels_without_tests_are_told(label, reason):
    with pytest.raises(ValueError) as told:  # noqa: PT011 (the message is compared below)
        parse_tests(label)
    assert str(told.value).startswith(reason)
    assert grade("", label, limits=LIMITS, sandboxed=True).status == "failed"


def test_an_answer_without_code_is_invalid_and_a_prompt_without_label_has_failed():
    assert grade("It is 42.", '["assert True"]', limits=LIMITS, sandboxed=True).status == "invalid"
    assert grade("```python\nx\n```", None, limits=LIMITS, sandboxed=True).status == "failed"


def judged(code, label, limits=None, *, sandboxed):
    """Return (status, share of tests, detail) of an answer with this code."""
    try:
        sandbox.require_sandbox(sandboxed=sandboxed)
    except UsageError as error:
        pytest.skip(f"CODE IS NOT RUN IN THE SANDBOX: {error}")
    label = label if isinstance(label, str) else json.dumps(label)
    limits = limits or (OF_HANGING if "while" in code or HANGS in code else LIMITS)
    verdict = grade(f"Thus:\n```python\n{code}\n```", label, limits=limits, sandboxed=sandboxed)
    return verdict.status, verdict.value, verdict.detail


@pytest.fixture
def judge():
    return partial(judged, sandboxed=True)


SUMS = {"inputs": ["1 2", "3 4", "5 6", "0 0"], "outputs": ["3\n", "7", "11", "0"]}


@pytest.mark.parametrize(
    ("code", "status", "share"),
    [
        ("print(sum(map(int, input().split())))", "correct", 1.0),
        (
            "if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b)\n    exit()",
            "correct",
            1.0,
        ),
        ("print(3)", "wrong", 0.25),
        ("a, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)", "wrong", 0.75),
        ("a, b = map(int, input().split())\nprint(a + b)\n1 / (a - 5)", "wrong", 0.75),
        ("a, b = map(int, input().split())\nprint(a + b)\nx = bytearray(10**9 * a)", "wrong", 0.25),
        ("def solve(:", "wrong", 0.0),
        ("", "wrong", 0.0),
    ],
)
def test_programs_are_judged_by_what_they_print(judge, code, status, share):
    assert judge(code, SUMS)[:2] == (status, share)


SQUARES = {"fn_name": "square", "inputs": [[2], [3], [4], [5]], "outputs": [4, 9, [16], 25]}


@pytest.mark.parametrize(
    ("code", "status", "share"),
    [
        ("def square(x):\n    print('noise')\n    return x * x", "correct", 1.0),
        ("class Solution:\n    def square(self, x):\n        return x ** 2", "correct", 1.0),
        ("def square(x):\n    return 4", "wrong", 0.25),
        (f"def square(x):\n    x == 3 and {HANGS}\n    return x * x", "wrong", 0.75),
        ("import os\ndef square(x):\n    x == 3 and os._exit(0)\n    return x * x", "wrong", 0.75),
        ("import sys\ndef square(x):\n    x == 3 and sys.exit(0)\n    return x * x", "wrong", 0.75),
        ("def square(x):\n    if x > 3: raise ValueError\n    return x * x", "wrong", 0.5),
        ("def square(x):\n    return {x}", "wrong", 0.0),
        ("def other(x):\n    return x * x", "wrong", 0.0),
        ("1 / 0", "wrong", 0.0),
        (HANGS, "wrong", 0.0),
        ("def square(x):\n    return x * x\nimport sys\nsys.exit(0)", "correct", 1.0),
        # An answer cannot claim to be right or look up the right answer.
        ("class Any:\n    def __eq__(self, other): return True\ndef square(x):\n    return Any()", "wrong", 0.0),
        ("print('[0, \"4\"]')\nimport os; os._exit(0)", "wrong", 0.0),
        ("def square(x):\n    return int(open('/dev/stdin').read() or 0)", "wrong", 0.0),
    ],
)
def test_functions_are_judged_by_what_they_return(judge, code, status, share):
    assert judge(code, SQUARES)[:2] == (status, share)


ASSERTIONS = [
    "assert add(1, 2) == 3",
    "assert add(0, 0) == 0",
    "assert add(-1, 1) == 0",
    "assert add('a', 'b') == 'ab'",
]


@pytest.mark.parametrize(
    ("code", "status", "share"),
    [
        ("def add(a, b):\n    return a + b", "correct", 1.0),
        ("def add(a, b):\n    return 0", "wrong", 0.5),
        (f"def add(a, b):\n    a == 0 and {HANGS}\n    return a + b", "wrong", 0.75),
        ("import os\ndef add(a, b):\n    os._exit(0)", "wrong", 0.0),
        ("import sys\nsys.exit(0)", "wrong", 0.0),
    ],
)
def test_assertions_are_counted_one_by_one(judge, code, status, share):
    assert judge(code, ASSERTIONS)[:2] == (status, share)
    assert judge(code, "# tests\n" + "\n".join(ASSERTIONS))[:2] == (status, share)


def test_what_prepares_assertions_is_no_test(judge):
    label = "import math\nroot = math.sqrt(16)\nassert half(root) == 2\nassert half(1) == 0"
    assert judge("def half(x):\n    return x // 2", label)[:2] == ("correct", 1.0)
    assert judge("def half(x):\n    return x / 2", label)[:2] == ("wrong", 0.5)


def test_an_answer_that_hangs_everywhere_ends_with_the_seconds_of_all(judge):
    label = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    limits = CodeLimits(timeout=0.3, memory_mb=200, total_seconds=0.8)
    status, share, detail = judge(HANGS, label, limits)
    assert (status, share) == ("wrong", 0.0)
    assert detail == "0 of 50 tests passed; a test timed out"


def test_the_first_trouble_is_told(judge):
    assert judge("print(1 / 0)", SUMS)[2] == "0 of 4 tests passed; it raised ZeroDivisionError: division by zero"
    assert judge("import json\nx = json.loads('[')", ASSERTIONS)[2].startswith(
        "0 of 4 tests passed; it raised json.dec"
    )


def test_answers_are_judged_the_same_without_the_sandbox():
    judge = partial(judged, sandboxed=False)
    assert judge("a, b = map(int, input().split())\nprint(a + b)\n1 / (a - 5)", SUMS)[:2] == ("wrong", 0.75)
    assert judge("import os\ndef square(x):\n    x == 3 and os._exit(0)\n    return x * x", SQUARES)[:2] == (
        "wrong",
        0.75,
    )
    assert judge("def add(a, b):\n    return 0", ASSERTIONS)[:2] == ("wrong", 0.5)


# --- as a reward of a run


def scores(responses, *, label, **settings):
    requests = [
        ScoreRequest("", "", text, label, num_tokens=1, truncated=False, group=str(number), sample=0, group_size=1)
        for number, text in enumerate(responses)
    ]
    with Scorer(RewardConfig(reward_funcs=["code(timeout=2, memory_mb=200)"], **settings)) as scorer:
        scorer.check_labels([label])
        return scorer.score(requests)


def test_the_reward_of_a_run_is_the_share_of_tests(judge):
    block = "```python\n{}\n```".format
    found = scores([block("print(sum(map(int, input().split())))"), block("print(3)"), "no"], label=json.dumps(SUMS))
    assert [(score.value, score.status) for score in found] == [(1.0, "correct"), (0.25, "wrong"), (0.0, "invalid")]


def test_what_hangs_is_wrong_and_does_not_fail(judge):
    label = json.dumps({"inputs": ["1"] * 50, "outputs": ["1"] * 50})
    (score,) = scores([f"```python\n{HANGS}\n```"], label=label, reward_timeout=4.0)
    assert (score.value, score.status) == (0.0, "wrong")


def test_labels_without_tests_are_refused_before_a_run(judge):
    with pytest.raises(UsageError, match=r"--reward_funcs code: 1 of 1 prompts .* has no assertions: 'f = 42'"):
        scores([], label="f = 42")


def test_running_without_the_sandbox_is_said_loudly(caplog):
    (score,) = scores(["```python\nprint(3)\n```"], label=json.dumps(SUMS), code_unsandboxed=True)
    assert score.value == 0.25
    assert "WITHOUT A SANDBOX" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_funcs": ["code(timeout=30)"]}, r"code\(timeout=30\) is too long for reward_timeout 30: all tests"),
        ({"reward_funcs": ["code(memory_mb=1)"]}, "memory_mb of code must be an integer >= 64"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**settings)


SKYWORK = {
    "assertions": {"assert_case": ["assert double(2) == 4", "assert double(3) == 6"]},
    "check": {
        "import_prefix": "from typing import *\n",
        "test_code": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "Solution().double",
    },
}


@pytest.mark.parametrize("form", SKYWORK)
def test_labels_of_skywork_are_tests(form: str) -> None:
    answer = "class Solution:\n    def double(self, number: Optional[int]): return 2 * number\n"
    answer = "def double(number): return 2 * number\n" if form == "assertions" else answer
    for code, status in ((answer, "correct"), (answer.replace("2 *", "3 *"), "wrong")):
        (score,) = scores([f"```python\n{code}```"], label=json.dumps(SKYWORK[form]))
        assert score.status == status
