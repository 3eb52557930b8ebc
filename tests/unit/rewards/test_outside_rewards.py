"""Custom rewards: `--reward_funcs file.py:NAME`, as documented on the page on extending."""

from dataclasses import replace
from pathlib import Path

import pytest
from extending_page import page_file
from pydantic import ValidationError
from scoring import config, group, score, values

from rlhf_cli.config.plugins import contents_of_plugins, require_plugins, without_folder
from rlhf_cli.config.rewards import REWARDS, read_call
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import expected, flags_of
from rlhf_cli.options import build_config
from rlhf_cli.rewards.scorer import Scorer


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return page_file(tmp_path, "number_rewards.py")


def rlhf_config(command: str, **settings):
    from rlhf_cli import cli

    needed = {"pretrain": "m", "prompt_data": "d", "output": "o"}
    return build_config(cli.COMMANDS[command].config_class, needed | settings)


def test_a_function_scores_responses_by_their_labels(page: Path) -> None:
    scores = score(config(reward_funcs=[f"{page}:closeness"]), "18", "19", "15")
    assert [found.value for found in scores] == [1.0, 0.5, 0.25]
    assert scores[1].parts == {"closeness": 0.5}


def test_a_verifier_has_parameters_and_is_added_to_a_built_in_reward(page: Path) -> None:
    settings = config(reward_funcs=[f"{page}:near(tolerance=2)", "format"], reward_weights=[2.0, 1.0])
    assert settings.has_verifier
    assert [(found.value, found.status) for found in score(settings, "17", "12", "none")] == [
        (2.0, "correct"),
        (0.0, "wrong"),
        (0.0, "invalid"),
    ]


def test_a_row_may_name_a_verifier_of_yours(page: Path) -> None:
    settings = config(reward_funcs=["by_row"], reward_by_source=f'{{"numbers": "{page}:near"}}')
    (sample,) = group("19")
    with Scorer(settings) as scorer:
        scorer.check_labels(["18"], ["numbers"])
        (found,) = scorer.score([replace(sample, source="numbers")])
    assert (found.status, found.metrics) == ("wrong", {"by_row/near": 0.0})


def test_a_failure_of_the_code_is_a_failed_reward_that_names_it(page: Path) -> None:
    (found,) = score(config(reward_funcs=[f"{page}:closeness"], reward_max_failures=1.0), "none")
    assert found.value is None
    assert "closeness raised ValueError: could not convert string to float: 'none'" in found.detail


def test_a_value_that_is_no_number_is_a_failed_reward(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def words(response, label):\n    return 'good'\n")
    (found,) = score(config(reward_funcs=[f"{file}:words"], reward_max_failures=1.0), "x")
    assert "returned 'good', not a number" in found.detail


def test_a_result_of_numpy_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "arrays.py"
    file.write_text("import numpy\n\n\ndef mean(response, label):\n    return numpy.float32(0.5)\n")
    assert values(config(reward_funcs=[f"{file}:mean"]), "x") == [0.5]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(response):\n    return 1\n", "f", "f has to take 2 arguments: response, label"),
        ("def f(response, label):\n    return 1\n", "g", r"has no g; it has f"),
        ("import nothing_like_this\n", "f", "the import of .* raises ModuleNotFoundError"),
        ("raise SystemExit(0)\n", "f", "the import of .* raises SystemExit"),
        ("def f(:\n", "f", "line 1 of .* is not valid Python"),
        ("def f(response, label):\n    return 1\n", "f(a=1)", "f has no parameter 'a': it takes none"),
    ],
)
def test_code_that_cannot_be_used_is_one_sentence(tmp_path: Path, source: str, name: str, message: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises((UsageError, ValidationError), match=message):
        rlhf_config("ppo", reward_funcs=f"{file}:{name}")


def test_paths_are_absolute_in_the_settings_and_bare_in_the_identity_of_a_run(page: Path, monkeypatch) -> None:
    monkeypatch.chdir(page.parent)
    settings = rlhf_config("grpo", reward_funcs="number_rewards.py:near(tolerance=2),math")
    require_plugins(settings)
    assert settings.reward.reward_funcs == [f"{page}:near(tolerance=2)", "math"]
    assert without_folder(settings.reward.reward_funcs) == ["number_rewards.py:near(tolerance=2)", "math"]
    assert set(contents_of_plugins(settings)) == {"reward_funcs"}


def test_the_same_name_twice_is_refused(page: Path) -> None:
    with pytest.raises(ValidationError, match="a reward is listed twice: near near"):
        config(reward_funcs=[f"{page}:near(tolerance=1)", f"{page}:near(tolerance=2)"])
    assert read_call(f"{page}:near").parameters == {"tolerance": 0.5}


@pytest.mark.parametrize("command", ["ppo", "eval", "generate", "serve-rm"])
def test_the_help_lists_the_names_of_the_table_and_the_forms_of_code(command: str) -> None:
    from rlhf_cli import cli

    flag = flags_of(cli.COMMANDS[command].config_class)["reward_funcs"]
    assert all(name in expected(flag) for name in REWARDS)
    assert "file.py:NAME" in expected(flag)
