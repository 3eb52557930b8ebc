"""Rewards and environments on the learn pages behave as the pages show."""

import json
import re
from pathlib import Path
from typing import Any

LEARN = Path(__file__).parents[2] / "docs" / "learn"
PAGE = (LEARN / "rewards.md").read_text()
LABEL = "8848 | chair | late | cancel"
MESSAGE = "Order 8848. The chair is late. I would like to cancel."


def reward_of(code: str, response: str) -> float:
    names: dict[str, Any] = {}
    exec(code, names)
    (reward,) = names["reward_func"]([response], [LABEL])
    return reward


def test_the_first_reward_pays_for_junk_and_the_second_does_not():
    first, second = re.findall(r"```python\n# ticket_reward.py\n(.*?)```", PAGE, re.DOTALL)
    spray = f"987654321 or {LABEL} or 987654321"
    assert [reward_of(first, text) for text in (LABEL, spray, MESSAGE)] == [1, 1, 1]
    assert [reward_of(second, text) for text in (LABEL, spray, MESSAGE)] == [1, 0, 0]


def test_the_second_reward_meets_the_expectations_and_the_first_half_of_them():
    first, second = re.findall(r"```python\n# ticket_reward.py\n(.*?)```", PAGE, re.DOTALL)
    expected = [json.loads(line) for line in re.findall(r"^\{\"row\".*$", PAGE, re.MULTILINE)]
    met = [[reward_of(code, row["response"]) == row["reward"] for row in expected] for code in (first, second)]
    assert [sum(each) for each in met] == [2, 4]


def test_the_environment_pays_for_the_right_sum_and_less_for_more_calls():
    (code,) = re.findall(r"```python\n# sums.py\n(.*?)```", (LEARN / "tools.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)

    def reward(num_calls: int, result: str) -> float:
        episode = names["Environment"]()
        episode.reset(answer="9", prompt="4+5=")
        assert [episode.calculate("4+5") for _ in range(num_calls)] == ["9"] * num_calls
        assert (episode.done, episode.submit(result), episode.done) == (False, "done", True)
        return episode.reward

    assert [reward(0, "9"), reward(1, "9"), reward(3, "9"), reward(1, "10")] == [1, 1, 0.8, 0]
