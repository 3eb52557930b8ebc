"""Reward files in real worker processes: correct, wrong, raising, hanging and crashing ones, and leftover processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from scoring import WriteFile, config, group, is_alive, request, score, values, wait_until

from rlhf_cli.backends.rollout.processes import process_tree
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.rewards.scorer import Scorer

pytestmark = pytest.mark.usefixtures("no_process_is_left")


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
        ("return {'values': [1.0, 1.0]}", "returned a dict with keys values, without rewards"),
        ("return {'overall': [1.0]}", "returned 1 values of overall for 2 responses"),
        ("return {'reward': 1.0}", "returned float, not a list of numbers"),
        ("return {'rewards': [1.0]}", "returned 1 values for 2 responses"),
        ("return [{'accuracy': 1.0}] * 2", "returned a dict with keys accuracy, without overall, reward, score"),
        ("return [float('nan')] * 2", "returned nan"),
        ("return [float('inf')] * 2", "returned inf"),
        ("return ['1.0'] * 2", "returned str '1.0', not a number"),
        ("return [None] * 2", "returned None"),
        ("return [10 ** 400] * 2", "returned an invalid number: int too large to convert to float"),
        ("os._exit(3)", "exited with code 3"),
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def score(a): pass\nclass Judge: pass",
            "has no function reward_func(queries, prompts, labels); it defines score",
        ),
        ("x = 1", "it defines no function"),
        ("reward_func = 3", "defines reward_func, but it is not a function"),
        (
            "def reward_func(texts): pass",
            "has a function with unsupported parameters (texts)",
        ),
        ("def reward_func(:\n", "is not valid Python: line 1"),
        ("\nimport no_such_module_at_all", "No module named 'no_such_module_at_all' (reward.py, line 2)"),
        ("raise ValueError('no key')", "raised ValueError: no key (reward.py, line 1)"),
        ("class reward_func:\n    def __init__(self, key): pass", "raised TypeError"),
        ("import os; os._exit(5)", "exited with code 5"),
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
    assert "reward workers" not in {thread.name for thread in threading.enumerate()}


def test_a_missing_reward_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.py: file not found"):
        Scorer(config(reward_func=str(tmp_path / "nowhere.py")))


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
from rlhf_cli.config.scoring import RewardConfig
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
    """The reward hangs, in one case while holding the interpreter lock, and has started a child process."""
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
    parent = subprocess.Popen([sys.executable, "-c", PARENT, path], cwd=Path(__file__).parents[3])
    try:
        wait_until((tmp_path / "pids").exists)
        others = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        asked = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
        assert asked < set(others)  # and the worker of the verifiers
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in others))


def test_workers_are_in_process_groups_of_their_own(reward_file: WriteFile) -> None:
    """Ctrl-C in the terminal reaches only the trainer, which decides when workers stop."""
    path = reward_file("import os\ndef reward_func(queries, prompts, labels): return [os.getpgrp() - os.getpid()]")
    assert values(config(reward_func=path), "a") == [0.0]
    assert os.getpgrp() != 0
