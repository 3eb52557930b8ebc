"""Scoring sessions: responses are added one at a time, and scores are returned as soon as they are known."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scoring import WriteFile, asked, config, finished, group, ready_scores, request, score, wait_until

from rlhf_cli.backends.rollout.processes import process_tree
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import RunError
from rlhf_cli.rewards.records import Score
from rlhf_cli.rewards.scorer import Scorer

pytestmark = pytest.mark.usefixtures("no_process_is_left")


def test_a_reward_that_compares_a_group_is_ready_with_its_last_response() -> None:
    with Scorer(config(reward_funcs=["exact", "length"])) as scorer, scorer.session() as session:
        session.add([asked("4", "4", tokens=3, of=2, sample=1)])
        session.add([asked("5", "4", tokens=3, of=1)])
        assert ready_scores(session, 1).keys() == {1}
        session.add([asked("4", "4", tokens=1, of=2, sample=0)])
        compared = ready_scores(session, 2)
        assert compared.keys() == {0, 2}
        assert [result.parts["length"] for result in finished(session)] == [-0.5, 0.0, 0.5]


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
        wait_until(all_are_seen)
        assert [seen[number] for number in range(4)] == finished(session)
        assert session.ready() == []


def test_an_environment_without_a_reward_counts_as_0_unless_it_is_needed() -> None:
    silent, other = (replace(asked("4", "4"), episode_reward=0.0, lacks_reward=lacks) for lacks in (True, False))
    settings = config(reward_funcs=["environment"], reward_max_failures=0.5)
    with Scorer(settings) as scorer:
        assert [score.value for score in scorer.score([silent, other])] == [0.0, 0.0]
    with Scorer(settings, needs_environment=True) as scorer:
        found = scorer.score([silent, other])
        assert [(score.value, score.failure) for score in found] == [(None, "environment"), (0.0, None)]
        with pytest.raises(RunError, match=r"^2 of 2 rewards failed, .* allows: the environment has no reward: set "):
            scorer.score([silent, replace(silent, group="other")])


@pytest.mark.parametrize(
    ("given", "is_asked"),
    [
        ({"reward_funcs": ["environment"]}, True),
        ({"reward_funcs": ["environment", "exact"]}, True),
        ({"reward_funcs": ["exact"]}, False),
        ({"reward_func": "reward.py"}, False),
    ],
)
def test_the_reward_of_an_environment_is_asked_for_by_its_name(given: dict[str, Any], is_asked: bool) -> None:
    assert RewardConfig.model_validate(given).asks_environment == is_asked
    assert not RewardConfig().asks_environment


PLACES = """
    def reward_func(queries, prompts, labels):
        return [float(10 * len(queries) + place) for place in range(len(queries))]
"""


def test_a_reward_file_is_asked_about_a_group_as_soon_as_it_is_complete(reward_file: WriteFile) -> None:
    first, second, third = group("18", "17", "16")
    settings = config(reward_funcs=["exact"], reward_func=reward_file(PLACES))
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add([third, request("4"), first])
        assert ready_scores(session, 1) == {1: Score(10.0, "wrong", "4", {"exact": 0.0, "reward_func": 10.0}, "4")}
        session.add([second])
        found = ready_scores(session, 3)
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
        assert asyncio.run(session.finish()).keys() == {2, 3}


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
        "reward_func exited with code 3",
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
