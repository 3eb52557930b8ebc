"""The scorer with real worker processes: rewards that are right, wrong, raise, hang or die, and what is left behind."""

import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from rlhf_cli.backends.rollout_processes import process_tree
from rlhf_cli.config.online import OnlineRewardConfig, RewardConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.session import ScoringSession

WriteFile = Callable[[str], str]


@pytest.fixture
def reward_file(tmp_path: Path) -> WriteFile:
    def write(source: str) -> str:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert not process_tree(os.getpid())


def config(**settings) -> RewardConfig:
    return RewardConfig.model_validate({"reward_timeout": 20.0, "reward_retries": 0} | settings)


NUMBERS = itertools.count()


def group(*responses: str, label: str | None = "18") -> list[ScoreRequest]:
    """The samples of one prompt."""
    name = str(next(NUMBERS))
    return [
        ScoreRequest(
            query="Q: " + response,
            prompt="Q: ",
            response=response,
            label=label,
            num_tokens=len(response),
            truncated=False,
            group=name,
            sample=sample,
            group_size=len(responses),
        )
        for sample, response in enumerate(responses)
    ]


def request(response: str, label: str | None = "18") -> ScoreRequest:
    """The only sample of a prompt."""
    return group(response, label=label)[0]


def finished(session: ScoringSession) -> list[Score]:
    """The scores that there are, by number of the response."""
    found = session.finish()
    return [found[number] for number in sorted(found)]


def score(settings: RewardConfig, *responses: str) -> list[Score]:
    with Scorer(settings) as scorer:
        return scorer.score(group(*responses))


def values(settings: RewardConfig, *responses: str) -> list[float | None]:
    return [result.value for result in score(settings, *responses)]


def test_verifiers_give_one_for_correct_and_zero_for_wrong_and_invalid() -> None:
    scores = score(config(reward_funcs=["gsm8k"]), "#### 18", "#### 17", "eighteen")
    assert [(s.value, s.status) for s in scores] == [(1.0, "correct"), (0.0, "wrong"), (0.0, "invalid")]
    assert scores[1].detail == "17"
    assert scores[0].parts == {"gsm8k": 1.0}
    assert [s.answer for s in scores] == ["18", "17", None]


def test_rewards_are_added_with_their_weights_and_kept_apart(reward_file: WriteFile) -> None:
    path = reward_file("""
        def reward_func(queries, prompts, labels):
            assert queries == [p + r for p, r in zip(prompts, ["18", "#### 18"])]
            assert labels == ["18", "18"]
            return [0.25, -1]
    """)
    settings = config(
        reward_funcs=["exact", "gsm8k"], reward_weights=[2.0, 0.5], reward_func=path, reward_func_weight=3.0
    )
    first, second = score(settings, "18", "#### 18")
    assert (first.value, first.status) == (2.75, "correct")
    assert first.parts == {"exact": 1.0, "gsm8k": 0.0, "reward_func": 0.25}
    assert (second.value, second.status) == (-2.5, "wrong")


def test_scores_keep_their_order_over_many_chunks_and_workers() -> None:
    responses = [f"#### {i % 40}" for i in range(1_000)]
    assert values(config(reward_funcs=["gsm8k"]), *responses) == [float(i % 40 == 18) for i in range(1_000)]


def test_no_requests_give_no_scores(reward_file: WriteFile) -> None:
    path = reward_file("def reward_func(queries, prompts, labels): raise AssertionError")
    assert score(config(reward_funcs=["gsm8k"], reward_func=path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def reward_func(queries, prompts, labels): return [len(q) for q in queries]",
        "def reward_func(q, p, l): return tuple(len(x) for x in q)",
        "async def reward_func(queries, prompts, labels):\n    import asyncio\n    await asyncio.sleep(0)\n"
        "    return [len(q) for q in queries]",
        "class reward_func:\n    def __call__(self, queries, prompts, labels): return [len(q) for q in queries]",
        "class reward_func:\n    async def __call__(self, queries, prompts, labels): return [len(q) for q in queries]",
        "class Reward:\n    def __call__(self, *columns): return [len(q) for q in columns[0]]\nreward_func = Reward()",
        "import numpy\ndef reward_func(queries, prompts, labels): return numpy.array([len(q) for q in queries])",
        "import numpy\ndef reward_func(queries, prompts, labels): return [numpy.float32(len(q)) for q in queries]",
    ],
    ids=["function", "tuple", "async", "class", "async class", "object", "array", "numpy scalars"],
)
def test_every_form_of_a_reward_file_works(reward_file: WriteFile, source: str) -> None:
    results = score(config(reward_func=reward_file(source)), "a", "bcd")
    assert [result.value for result in results] == [4.0, 6.0]
    assert {result.status for result in results} == {"scored"}


def test_an_async_reward_keeps_its_event_loop_between_calls(reward_file: WriteFile) -> None:
    path = reward_file("""
        import asyncio
        seen = set()
        async def reward_func(queries, prompts, labels):
            seen.add(asyncio.get_running_loop())
            return [float(len(seen))]
    """)
    with Scorer(config(reward_func=path)) as scorer:
        assert [scorer.score([request("a")])[0].value for _ in range(3)] == [1.0, 1.0, 1.0]


def test_calls_of_an_async_reward_that_wait_are_open_at_the_same_time(reward_file: WriteFile) -> None:
    path = reward_file("""
        import asyncio
        running = 0
        async def reward_func(queries, prompts, labels):
            global running
            running += 1
            await asyncio.sleep(0.05)
            running, seen = running - 1, running
            if queries[0].endswith("bad"):
                raise ValueError
            return [float(seen)]
    """)
    requests = [request("bad" if i == 4 else "a") for i in range(9)]
    with Scorer(config(reward_func=path, reward_num_workers=1, reward_max_failures=1)) as scorer:
        scores = scorer.score(requests)
    assert [score.status for score in scores].count("failed") == 1
    assert max(score.value or 0 for score in scores) > 2


def test_an_async_call_that_hangs_takes_no_other_along(reward_file: WriteFile, tmp_path: Path) -> None:
    path = reward_file(f"""
        import asyncio
        async def reward_func(queries, prompts, labels):
            open({str(tmp_path / "calls")!r}, "a").write(queries[0] + ",")
            await asyncio.sleep(600 if "hang" in queries[0] else 0.01)
            return [1.0]
    """)
    texts = ["hang 1", *(f"good {i}" for i in range(8)), "hang 2"]
    settings = config(reward_func=path, reward_num_workers=1, reward_timeout=1.5, reward_max_failures=1)
    with Scorer(settings) as scorer:
        scores = scorer.score([request(text) for text in texts])
    assert [score.failure for score in scores] == ["timeout", *[None] * 8, "timeout"]
    calls = (tmp_path / "calls").read_text().removesuffix(",").split(",")
    assert sorted(calls) == sorted("Q: " + text for text in texts)


def test_a_class_is_instantiated_once(reward_file: WriteFile) -> None:
    path = reward_file("""
        class reward_func:
            instances = 0
            def __init__(self):
                type(self).instances += 1
                self.calls = 0
            def __call__(self, queries, prompts, labels):
                self.calls += 1
                return [self.instances + 10 * self.calls]
    """)
    with Scorer(config(reward_func=path)) as scorer:
        assert [scorer.score([request("a")])[0].value for _ in range(3)] == [11.0, 21.0, 31.0]


def test_a_worker_does_not_import_torch_and_sees_files_beside_the_reward_file(
    reward_file: WriteFile, tmp_path: Path
) -> None:
    (tmp_path / "bonus.py").write_text("BONUS = 3.0")
    path = reward_file("""
        import sys
        from bonus import BONUS
        def reward_func(queries, prompts, labels):
            heavy = {"torch", "numpy", "pydantic", "ray"} & set(sys.modules)
            assert not heavy, heavy
            return [BONUS]
    """)
    assert values(config(reward_funcs=["exact"], reward_func=path), "a") == [3.0]


def test_prints_of_a_reward_do_not_get_between_results(reward_file: WriteFile) -> None:
    path = reward_file("""
        import os
        def reward_func(queries, prompts, labels):
            print('{"value": [[7.0, ""]]}', flush=True)
            os.write(1, b'{"value": 3}\\n')
            return [1.0]
    """)
    assert values(config(reward_func=path), "a") == [1.0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero (reward.py, line 3)"),
        ("import sys; sys.exit(1)", "raised SystemExit: 1 (reward.py, line 3)"),
        ("return [1.0]", "returned 1 values for 2 responses"),
        ("return [1.0] * 3", "returned 3 values for 2 responses"),
        ("return None", "returned NoneType, not a list of numbers"),
        ("return 1.0", "returned float, not a list of numbers"),
        ("return {'rewards': [1.0, 1.0]}", "returned dict, not a list of numbers"),
        ("return [float('nan')] * 2", "returned nan"),
        ("return [float('inf')] * 2", "returned inf"),
        ("return ['1.0'] * 2", "returned str '1.0', not a number"),
        ("return [None] * 2", "returned NoneType 'None', not a number"),
        ("return [10 ** 400] * 2", "returned a value that is no number: int too large to convert to float"),
        ("os._exit(3)", "ended its process with exit code 3"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("os.abort()", "was killed by SIGABRT"),
        ("raise ValueError('two\\n  lines')", "raised ValueError: two lines (reward.py, line 3)"),
    ],
)
def test_a_broken_reward_is_a_failure_with_its_reason(reward_file: WriteFile, body: str, reason: str) -> None:
    path = reward_file(f"import os\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    scores = score(config(reward_func=path, reward_max_failures=1.0), "a", "b")
    assert [(s.value, s.status) for s in scores] == [(None, "failed")] * 2
    assert scores[0].detail.splitlines()[0] == "reward_func " + reason
    with pytest.raises(RunError) as caught:
        score(config(reward_func=path, reward_max_failures=0.5), "a", "b")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failure_keeps_the_first_lines_of_the_users_traceback(reward_file: WriteFile) -> None:
    path = reward_file("""
        def ratio(a, b):
            return a / b
        def reward_func(queries, prompts, labels):
            return [ratio(1, 0)]
    """)
    detail = score(config(reward_func=path, reward_max_failures=1.0), "a")[0].detail
    assert "return ratio" not in detail.splitlines()[0]
    assert "return [ratio(1, 0)]" in detail
    assert "user_file.py" not in detail


HANGS = {
    "sleep": "import time; time.sleep(600)",
    "loop holding the interpreter lock": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "signals ignored": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "async": "import asyncio; asyncio.run(asyncio.sleep(600))",
    "child process": "import subprocess; subprocess.run(['sleep', '600'])",
}


@pytest.mark.parametrize("body", HANGS.values(), ids=HANGS.keys())
def test_a_reward_that_hangs_is_killed_and_the_next_call_works(reward_file: WriteFile, body: str) -> None:
    path = reward_file(f"""
        def reward_func(queries, prompts, labels):
            if "hang" in queries[0]:
                {body}
            return [2.0] * len(queries)
    """)
    with Scorer(config(reward_func=path, reward_timeout=1.0, reward_max_failures=1.0)) as scorer:
        *failed, other = scorer.score([*group("hang", "a"), request("a")])
        assert [(s.failure, s.detail) for s in failed] == [("timeout", "reward_func did not answer within 1 s")] * 2
        assert other.value == 2.0
        assert [s.value for s in scorer.score([request("a")])] == [2.0]


def asked(
    response: str, label: str, *, tokens: int = 1, of: int = 1, sample: int = 0, prompt: str = "Q: "
) -> ScoreRequest:
    """A sample of a prompt of which there are `of`; a group of its own if it is the only one."""
    group = "g" if of > 1 else str(next(NUMBERS))
    return ScoreRequest(prompt + response, prompt, response, label, tokens, False, group, sample, of)


def test_rewards_of_every_kind_add_up_with_weights_and_parameters() -> None:
    settings = config(
        reward_funcs=["format", "cosine(max_len=100)", "math", "length", "soft_overlong(max_len=100, buffer=50)"],
        reward_weights=[0.5, 1, 2, 10, 1],
    )
    right, wrong = "<think>a</think><answer>\\boxed{4}</answer>", "3"
    with Scorer(settings) as scorer:
        first, second, other = scorer.score(
            [
                asked(right, "4", tokens=0, of=2, sample=0),
                asked(wrong, "4", tokens=100, of=2, sample=1),
                asked(wrong, "4", tokens=100),
            ]
        )
    assert first.parts == {"format": 1.0, "cosine": 1.0, "math": 1.0, "length": 0.5, "soft_overlong": 0.0}
    assert (first.value, first.status, first.answer) == (8.5, "correct", "4")
    assert second.parts == {
        "format": 0.0,
        "cosine": pytest.approx(-0.1),
        "math": 0.0,
        "length": -0.5,
        "soft_overlong": -1,
    }
    assert (second.value, second.status) == (pytest.approx(-6.1), "wrong")
    assert other.parts == second.parts | {"length": 0.0}


def test_what_goes_by_a_verdict_fails_with_it() -> None:
    settings = config(reward_funcs=["cosine", "format", "boxed", "length"], reward_max_failures=0.5)
    with Scorer(settings) as scorer:
        failed, good = scorer.score(
            [asked("\\boxed{1}", "x", of=2, sample=0), asked("\\boxed{1}", "1", tokens=2, of=2, sample=1)]
        )
    assert failed == Score(None, "failed", "boxed: label 'x' is not a number", {"format": 0.0}, failure="unjudged")
    assert (good.status, good.parts["length"]) == ("correct", -0.5)


def test_rewards_without_a_verifier_give_no_verdict() -> None:
    (only,) = score(config(reward_funcs=["tag_count"]), "<answer>5</answer>")
    assert only == Score(0.5, "scored", "", {"tag_count": 0.5})


def test_a_tag_that_the_prompt_opened_counts_as_the_responses() -> None:
    answer = "a</think><answer>b</answer>"
    with Scorer(config(reward_funcs=["format"])) as scorer:
        scores = scorer.score([asked(answer, "4"), asked(answer, "4", prompt="Assistant: <think>\n")])
    assert [result.value for result in scores] == [0.0, 1.0]


def test_a_reward_that_compares_a_group_is_ready_with_its_last_response() -> None:
    with Scorer(config(reward_funcs=["exact", "length"])) as scorer, scorer.session() as session:
        session.add([asked("4", "4", tokens=3, of=2, sample=1)])
        session.add([asked("5", "4", tokens=3, of=1)])
        assert _ready(session, 1).keys() == {1}
        session.add([asked("4", "4", tokens=1, of=2, sample=0)])
        compared = _ready(session, 2)
        assert compared.keys() == {0, 2}
        assert [result.parts["length"] for result in finished(session)] == [-0.5, 0.0, 0.5]


def _ready(session: ScoringSession, count: int) -> dict[int, Score]:
    """The next scores of a session before its end."""
    found: dict[int, Score] = {}
    _wait_until(lambda: bool(found.update(session.ready())) or len(found) >= count)
    return found


def test_a_session_gives_the_scores_of_a_whole_batch() -> None:
    responses = [f"#### {i % 25}" for i in range(100)]
    settings = config(reward_funcs=["gsm8k", "exact"])
    with Scorer(settings) as scorer:
        for size in (1, 7, 100):
            with scorer.session() as session:
                for start in range(0, 100, size):
                    chunk = [request(response) for response in responses[start : start + size]]
                    assert session.add(chunk) == range(start, start + len(chunk))
                assert finished(session) == score(settings, *responses)


def test_every_score_is_ready_once_before_the_end() -> None:
    with Scorer(config(reward_funcs=["gsm8k"])) as scorer, scorer.session() as session:
        seen: dict[int, Score] = {}

        def all_are_seen() -> bool:
            new = session.ready()
            assert not seen.keys() & dict(new).keys()
            seen.update(new)
            return len(seen) == 4

        session.add([request("#### 18"), request("#### 17")])
        session.add([request("18"), request("#### 18")])
        _wait_until(all_are_seen)
        assert [seen[number] for number in range(4)] == finished(session)
        assert session.ready() == []


PLACES = """
    def reward_func(queries, prompts, labels):
        return [float(10 * len(queries) + place) for place in range(len(queries))]
"""


def test_a_reward_file_is_asked_about_a_group_as_soon_as_it_is_complete(reward_file: WriteFile) -> None:
    first, second, third = group("18", "17", "16")
    settings = config(reward_funcs=["exact"], reward_func=reward_file(PLACES))
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add([third, request("4"), first])
        assert _ready(session, 1) == {1: Score(10.0, "wrong", "4", {"exact": 0.0, "reward_func": 10.0}, "4")}
        session.add([second])
        found = _ready(session, 3)
        assert {number: score.value for number, score in found.items()} == {0: 32.0, 2: 31.0, 3: 31.0}
        assert [score.value for score in finished(session)] == [32.0, 10.0, 31.0, 31.0]
        assert session.ready() == []


def test_what_compares_a_group_does_not_depend_on_the_order_of_arrival(reward_file: WriteFile) -> None:
    asked = [*group("18", "1", "144"), *group("7", "77")]
    settings = config(reward_funcs=["exact", "length"], reward_func=reward_file(PLACES))
    found = []
    with Scorer(settings) as scorer:
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            with scorer.session() as session:
                for number in order:
                    session.add([asked[number]])
                found.append(dict(sorted(zip(order, finished(session), strict=True))))
    assert found[0] == found[1]


@pytest.mark.parametrize("way", ["reward_func", "length"])
def test_a_group_that_stays_incomplete_is_not_compared(reward_file: WriteFile, way: str) -> None:
    path = reward_file(PLACES) if way == "reward_func" else None
    settings = config(reward_funcs=["exact", "length"] if way == "length" else ["exact"], reward_func=path)
    first, _, third = group("18", "1", "177")
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add([third])
        session.add([first, *group("18", "4")])
        assert session.finish().keys() == {2, 3}


def test_a_reward_file_that_hangs_is_not_waited_for_longer_than_it_takes_to_know(reward_file: WriteFile) -> None:
    path = reward_file("def reward_func(queries, prompts, labels):\n    while True: pass")
    settings = config(reward_func=path, reward_timeout=0.3, reward_num_workers=1)
    with Scorer(settings) as scorer, pytest.raises(RunError, match=r"^2 of 2 rewards failed, .*within 0\.3 s"):
        scorer.score([request("a") for _ in range(19)])


def test_groups_fail_one_by_one(reward_file: WriteFile) -> None:
    path = reward_file("""
        import os
        def reward_func(queries, prompts, labels):
            if "die" in queries[0]:
                os._exit(3)
            return [1 / ("raise" not in query) for query in queries]
    """)
    with Scorer(config(reward_func=path, reward_max_failures=1.0)) as scorer:
        scores = scorer.score([*group("a", "b"), *group("a", "raise"), *group("die", "a"), request("a")])
    assert [score.value for score in scores] == [1.0, 1.0, None, None, None, None, 1.0]
    assert [score.failure for score in scores] == [None, None, "raised", "raised", "crashed", "crashed", None]
    assert [score.detail.partition("\n")[0] for score in scores[3:5]] == [
        "reward_func raised ZeroDivisionError: division by zero (reward.py, line 6)",
        "reward_func ended its process with exit code 3",
    ]


def test_several_workers_run_the_file_at_the_same_time(reward_file: WriteFile, tmp_path: Path) -> None:
    path = reward_file(f"""
        import os, time
        from pathlib import Path
        def reward_func(queries, prompts, labels):
            (Path({str(tmp_path)!r}) / f"seen {{os.getpid()}}").touch()
            while len(list(Path({str(tmp_path)!r}).glob("seen *"))) < 2:  # each waits for the other
                time.sleep(0.01)
            return [1.0]
    """)
    with Scorer(config(reward_func=path, reward_num_workers=2)) as scorer:
        assert [result.value for result in scorer.score([request("a"), request("b")])] == [1.0, 1.0]


def test_there_are_as_many_workers_as_the_settings_say(reward_file: WriteFile) -> None:
    path = reward_file("import os\ndef reward_func(queries, prompts, labels): return [os.getpid()] * len(queries)")
    for number in (1, 3):
        settings = config(reward_funcs=["gsm8k"], reward_func=path, reward_num_workers=number)
        with Scorer(settings) as scorer:
            scores = scorer.score([request("a") for _ in range(2_000)])
            assert len(process_tree(os.getpid())) == 2 * number
        assert len({score.parts["reward_func"] for score in scores}) <= number


def test_a_session_that_ends_early_leaves_no_work_for_the_next() -> None:
    with Scorer(config(reward_funcs=["gsm8k"])) as scorer:
        with scorer.session() as session:
            session.add([request("#### 17") for _ in range(10_000)])
        assert [result.value for result in scorer.score([request("#### 18")])] == [1.0]


def test_a_session_is_no_whole_iteration_and_leaves_failures_to_be_judged_by_others() -> None:
    asked = [request("#### 18"), request("#### 18", label="eighteen")]
    with Scorer(config(reward_funcs=["gsm8k"], reward_max_failures=0.2)) as scorer:
        with scorer.session() as session:
            session.add(asked)
            assert [score.status for score in finished(session)] == ["correct", "failed"]
        with pytest.raises(RunError, match="1 of 2 rewards failed"):
            scorer.score(asked)


def test_a_failure_is_retried_as_often_as_allowed(reward_file: WriteFile, tmp_path: Path) -> None:
    path = reward_file(f"""
        from pathlib import Path
        def reward_func(queries, prompts, labels):
            calls = Path({str(tmp_path / "calls")!r})
            calls.open("a").write("x")
            assert len(calls.read_text()) > 2, "not yet"
            return [1.0] * len(queries)
    """)
    with pytest.raises(RunError, match="AssertionError: not yet"):
        score(config(reward_func=path, reward_retries=1), "a")
    (tmp_path / "calls").unlink()
    assert values(config(reward_func=path, reward_retries=2), "a") == [1.0]
    assert (tmp_path / "calls").read_text() == "xxx"


def test_values_that_were_good_are_kept_when_others_are_asked_for_again(reward_file: WriteFile) -> None:
    path = reward_file("""
        calls = 0
        def reward_func(queries, prompts, labels):
            global calls
            calls += 1
            return [float(calls), float(calls) if calls > 1 else float("nan"), float("nan")]
    """)
    settings = config(reward_func=path, reward_retries=1, reward_max_failures=0.5)
    assert [(s.value, s.failure) for s in score(settings, "a", "b", "c")] == [
        (1.0, None),
        (2.0, None),
        (None, "bad_result"),
    ]


def test_failures_up_to_the_allowed_share_only_mark_their_samples(reward_file: WriteFile) -> None:
    path = reward_file("""
        def reward_func(queries, prompts, labels):
            return [float("nan") if "bad" in q else 1.0 for q in queries]
    """)
    responses = ["bad", "a", "b", "c"]
    scores = score(config(reward_funcs=["exact"], reward_func=path, reward_max_failures=0.25), *responses)
    assert [s.value for s in scores] == [None, 1.0, 1.0, 1.0]
    assert scores[0].parts == {"exact": 0.0}
    with pytest.raises(RunError, match=r"1 of 4 rewards failed, more than --reward_max_failures 0\.2 allows"):
        score(config(reward_func=path, reward_max_failures=0.2), *responses)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def score(a): pass\nclass Judge: pass",
            "has no function reward_func(queries, prompts, labels); it has score",
        ),
        ("x = 1", "it defines no function"),
        ("reward_func = 3", "has reward_func, but it is not a function"),
        ("def reward_func(queries): pass", "cannot be called with (queries, prompts, labels)"),
        ("def reward_func(:\n", "is not valid Python: line 1"),
        ("\nimport no_such_module_at_all", "No module named 'no_such_module_at_all' (reward.py, line 2)"),
        ("raise ValueError('no key')", "raised ValueError: no key (reward.py, line 1)"),
        ("class reward_func:\n    def __init__(self, key): pass", "raised TypeError"),
        ("import os; os._exit(5)", "ended its process with exit code 5"),
    ],
)
def test_an_unusable_reward_file_is_refused_before_anything_starts(
    reward_file: WriteFile, source: str, message: str
) -> None:
    path = reward_file(source)
    with pytest.raises(UsageError) as caught:
        Scorer(config(reward_func=path))
    assert str(caught.value).startswith(f"--reward_func {path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_reward_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.py: there is no such file"):
        Scorer(config(reward_func=str(tmp_path / "nowhere.py")))


def test_labels_that_a_verifier_cannot_use_are_found_beforehand() -> None:
    with Scorer(config(reward_funcs=["exact", "boxed"], reward_max_failures=0.25)) as scorer:
        scorer.check_labels(["1", "2", "3", "x + 1"])
        with pytest.raises(UsageError, match=r"boxed: 2 of 4 prompts .* label 'x \+ 1' is not a number"):
            scorer.check_labels(["1", "2", "x + 1", "?"])
        with pytest.raises(UsageError, match=r"exact: 2 of 2 prompts .* no label"):
            scorer.check_labels([None, None])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no reward"),
        ({"reward_funcs": ["gsm9k"]}, "there is no reward 'gsm9k'"),
        ({"reward_funcs": ["exact", "exact"]}, "named twice"),
        ({"reward_funcs": ["exact"], "reward_weights": [1.0, 2.0]}, "2 values for 1"),
        ({"reward_funcs": ["exact"], "reward_clip_range": (1.0, 1.0)}, "is empty"),
        ({"reward_funcs": ["exact"], "reward_func_weight": 2.0}, "reward_func_weight is about .*: give --reward_func"),
    ],
)
def test_bad_reward_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no reward: give --reward_funcs .* --reward_pretrain MODEL or --remote_rm_url URL"),
        ({"reward_funcs": ["exact"], "normalize_reward": True}, "normalize_reward is about .*: give --reward_pretrain"),
        ({"reward_funcs": ["exact"], "reward_model_weight": 2.0}, "reward_model_weight is about"),
        ({"reward_pretrain": "rm", "reward_clip_range": (1.0, 1.0)}, "is empty"),
        ({"reward_pretrain": "rm", "reward_weights": [1.0]}, "1 values for 0"),
    ],
)
def test_bad_settings_of_a_reward_model_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnlineRewardConfig(**settings)


def test_a_reward_model_alone_starts_from_zero_and_no_process() -> None:
    with Scorer(OnlineRewardConfig(reward_pretrain="rm")) as scorer:
        scorer.check_labels([None])
        scores = scorer.score([request("a"), request("b", label=None)])
        assert not process_tree(os.getpid())
    assert scores == [Score(0.0, "scored")] * 2


def test_a_reward_models_score_is_added_with_its_weight() -> None:
    scores = [Score(1.0, "correct", "18", {"gsm8k": 1.0}), Score(0.0, "wrong"), Score(None, "failed", "grader broke")]
    joined = with_model_scores(scores, [2.0, -3.0, 4.0], weight=0.25)
    assert joined == [
        Score(1.5, "correct", "18", {"gsm8k": 1.0, "reward_model": 2.0}),
        Score(-0.75, "wrong", "", {"reward_model": -3.0}),
        Score(None, "failed", "grader broke", {"reward_model": 4.0}),
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_of_a_reward_model_that_is_no_number_has_failed(value: float) -> None:
    scores = [Score(1.0, "correct", "18")] * 2
    joined = with_model_scores(scores, [1.0, value], weight=1.0)
    assert joined[0].value == 2.0
    assert joined[1] == Score(None, "failed", f"the reward model's score is {value}", failure="bad_result")


def test_too_many_failures_stop_a_run_unless_scores_to_come_may_make_up_for_them() -> None:
    scores = [
        Score(1.0, "correct"),
        Score(None, "failed", "a"),
        Score(None, "failed", "b\nat"),
        Score(None, "failed", "b"),
    ]
    stop_if_too_many_failed(scores, 0.75)
    stop_if_too_many_failed(scores, 0.5, num_to_come=2)
    with pytest.raises(RunError, match=r"^3 of 4 rewards failed, more than --reward_max_failures 0\.5 allows: b$"):
        stop_if_too_many_failed(scores, 0.5, num_to_come=1)


def test_an_exception_in_the_run_leaves_no_process(reward_file: WriteFile) -> None:
    path = reward_file("def reward_func(queries, prompts, labels): return [1.0]")

    def run() -> None:
        with Scorer(config(reward_funcs=["exact"], reward_func=path)) as scorer:
            scorer.score([request("a")])
            assert process_tree(os.getpid())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not process_tree(os.getpid())


PARENT = """
import sys, threading
from rlhf_cli.config.online import RewardConfig
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.scorer import Scorer

scorer = Scorer(RewardConfig(reward_funcs=["exact"], reward_func=sys.argv[1]))
asked = [ScoreRequest("q", "p", "r", "l", 1, False, "g", 0, 1)]
thread = threading.Thread(target=scorer.score, args=(asked,))  # a thread that ends must not take workers with it
thread.start()
thread.join()
asked = [ScoreRequest("hang", "p", "r", "l", 1, False, "g", 0, 1)]
scorer.score(asked)
"""


@pytest.mark.parametrize("body", ["import time; time.sleep(600)", "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')"])
def test_no_process_is_left_when_the_parent_is_killed(reward_file: WriteFile, tmp_path: Path, body: str) -> None:
    """The reward hangs, once while it holds the interpreter lock, and has started a child of its own."""
    path = reward_file(f"""
        import os, subprocess
        from pathlib import Path
        def reward_func(queries, prompts, labels):
            if queries[0] == "hang":
                child = subprocess.Popen(["sleep", "600"])
                Path({str(tmp_path / "new")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
                os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pids")!r})
                {body}
            return [1.0]
    """)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, path], cwd=Path(__file__).parents[1])
    try:
        _wait_until((tmp_path / "pids").exists)
        others = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        asked = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
        assert asked < set(others)  # and the verifiers' worker
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _wait_until(lambda: not any(_is_alive(pid) for pid in others))


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_workers_are_in_process_groups_of_their_own(reward_file: WriteFile) -> None:
    """Ctrl-C at the terminal reaches the trainer, which decides what becomes of them."""
    path = reward_file("import os\ndef reward_func(queries, prompts, labels): return [os.getpgrp() - os.getpid()]")
    assert values(config(reward_func=path), "a") == [0.0]
    assert os.getpgrp() != 0
