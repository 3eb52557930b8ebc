"""Custom advantage estimators: the documented examples work, and invalid results are rejected."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from extending_page import page_file
from online_settings import resolve
from settings_files import from_yaml

from rlhf_cli import cli
from rlhf_cli.algorithms.advantages import compute_advantages
from rlhf_cli.algorithms.estimators.estimator import Experience
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.plugins import load_target, require_plugins
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.foreign.translation import translate, translate_settings
from rlhf_cli.options import to_yaml
from rlhf_cli.runs.online.checks import check_settings
from rlhf_cli.runs.online.estimator import estimator_of, tried_estimator
from rlhf_cli.runs.online.identity import settings_identity

# Five responses with one token each, except that the second has two; three belong to the first prompt.
EXPERIENCE = Experience(
    shaped_N=torch.tensor([1.0, 0.0, 5.0, 2.0, 4.0, 8.0]),
    parts=(),
    values_N=None,
    bootstrap_B=None,
    cu=torch.tensor([0, 1, 3, 4, 5, 6]),
    groups_B=torch.tensor([0, 0, 0, 1, 1]),
    trained_B=torch.ones(5, dtype=torch.bool),
    greedy_B=None,
)
LESS_MEDIAN = torch.tensor([-1.0, 3.0, 3.0, 0.0, -2.0, 2.0])  # medians 2 and 6


def test_the_page_s_estimator_has_the_needs_of_the_command(tmp_path) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    config = resolve("rloo", advantage_estimator=f"{path}:less_median")
    require_plugins(config)
    estimator = estimator_of(config)
    assert (estimator.name, estimator.min_group, estimator.whiten) == ("median_baseline.py:less_median", 2, False)
    found = compute_advantages(estimator, EXPERIENCE, settings=config.policy)
    torch.testing.assert_close(found.at_tokens(EXPERIENCE.cu), LESS_MEDIAN)
    assert found.returns_N is None


def test_the_page_s_row_states_its_needs(tmp_path) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    config = resolve("grpo", advantage_estimator=f"{path}:whitened")
    require_plugins(config)
    estimator = estimator_of(config)
    assert estimator.min_group == 3
    found = compute_advantages(estimator, EXPERIENCE, settings=config.settings_of_code("advantage_estimator"))
    assert found.metrics == {"positive": pytest.approx(2 / 5)}
    assert found.at_tokens(EXPERIENCE.cu).mean().item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(UsageError, match=r"this command trains a critic, but the Estimator has critic=False: .*=True"):
        estimator_of(resolve("ppo", advantage_estimator=f"{path}:whitened"))


def test_settings_of_the_command_s_estimator_are_refused_if_the_own_one_has_settings(tmp_path) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    code = f"{path}:whitened"
    for given in (
        {"advantage_estimator": code, "quantile": "0.75", "preset": "dr_grpo"},
        {"advantage_estimator": f"{path}:less_median", "advantage_std": "none"},
    ):
        config = resolve("grpo", **given)
        check_settings(config, estimator_of(config))
    config = resolve("grpo", advantage_estimator=code, advantage_std="none")
    with pytest.raises(UsageError, match=r"--advantage_std: --advantage_estimator .* reads its own settings"):
        check_settings(config, estimator_of(config))


def test_settings_of_built_in_estimators_are_the_command_s_policy_settings() -> None:
    assert not [row.name for row in ESTIMATORS.values() if row.settings]


def test_an_estimator_s_setting_is_a_flag_a_line_of_the_file_and_part_of_the_run_s_identity(tmp_path, capsys) -> None:
    code = f"{page_file(tmp_path, 'median_baseline.py')}:whitened"
    config = resolve("grpo", advantage_estimator=code, quantile="0.75")
    assert settings_identity(config) == settings_identity(resolve("grpo")) | {"quantile": 0.75}
    assert "quantile: 0.75" in to_yaml(config)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert to_yaml(from_yaml(cli.COMMANDS["grpo"].config_class, file)) == to_yaml(config)
    assert default_settings(config)["quantile"] == 0.5
    for words in (["--advantage_estimator", code], [f"--advantage-estimator={code}"], ["--config", str(file)]):
        assert cli.main(["grpo", *words, "--help"]) == 0
        assert "--quantile" in capsys.readouterr().out
    assert cli.main(["rloo", "--help"]) == 0
    assert "--quantile" not in capsys.readouterr().out


def test_faults_in_an_estimator_s_setting_are_named_with_the_others(tmp_path, capsys) -> None:
    code = f"{page_file(tmp_path, 'median_baseline.py')}:whitened"
    assert cli.main(["grpo", "--advantage_estimator", code, "--quantile", "3", "--pretrain", "x"]) == 2
    said = capsys.readouterr().err
    assert "missing --prompt_data, --output" in said
    assert "--quantile 3: must be a number > 0 and < 1" in said


def test_a_setting_of_another_object_in_the_file_is_named(tmp_path, capsys) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    code = f"{path}:less_median"
    assert cli.main(["grpo", "--advantage_estimator", code, "--quantile", "0.3", "--quantil", "0.3"]) == 2
    said = capsys.readouterr().err
    named = f"it is a setting of whitened, set --advantage_estimator {path}:whitened"
    assert f"unknown flag --quantile: {named}; unknown flag --quantil" in said


def test_a_missing_name_is_answered_with_the_estimators_of_the_file(tmp_path) -> None:
    code = f"{page_file(tmp_path, 'median_baseline.py')}:whitend"
    with pytest.raises(UsageError) as refusal:
        resolve("grpo", advantage_estimator=code)
    message = "has no whitend (did you mean whitened?); it has less_median, less_quantile, whitened"
    assert str(refusal.value).endswith(message)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("gamma: float = 1.0", "own.py:row: its setting gamma is already a flag of this command"),
        ("help: float = 1.0", "its setting help is already a flag of this command"),
        ("strength: float", "its setting strength needs a default"),
    ],
)
def test_settings_that_cannot_be_flags_are_refused(field, reason, tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from rlhf_cli.algorithms.estimators.estimator import Estimator\n"
        "from rlhf_cli.config.base import SettingsGroup\n"
        f"class Own(SettingsGroup):\n    {field}\n"
        "row = Estimator(advantages=lambda experience, settings: experience.rewards_N, settings=Own, critic=True)\n"
    )
    with pytest.raises(UsageError, match=reason):
        resolve("ppo", advantage_estimator=f"{tmp_path}/own.py:row")


def own(tmp_path: Path, source: str) -> str:
    """Write an estimator to a file and return it as code."""
    (tmp_path / "own.py").write_text(
        f"from rlhf_cli.algorithms.estimators.estimator import Advantages, Estimator\n{source}\n"
    )
    return f"{tmp_path}/own.py:f"


# With 8 samples, the made-up rollout has 16 responses of 1 and 2 tokens in turns.
@pytest.mark.parametrize(
    ("command", "source", "reason"),
    [
        (
            "grpo",
            "def f(experience, settings): return experience.rewards_B",
            r"own.py:f must return advantages of shape \(24,\), one per response token, not \(16,\)",
        ),
        (
            "grpo",
            "def f(experience, settings): return Advantages(per_response_B=experience.rewards_N)",
            r"own.py:f must return per_response_B of shape \(16,\), one per response, not \(24,\)",
        ),
        ("grpo", "def f(experience, settings): return 3.0", "must return advantages of shape .*, not float"),
        ("ppo", "def f(experience, settings): return experience.rewards_N", "must return returns of shape .*NoneType"),
        (
            "grpo",
            "def f(experience, settings):\n    return settings.trim",
            r"own.py:f: f raises AttributeError in line 3 on a made-up rollout: 'GroupPolicyConfig' .* 'trim'",
        ),
        (
            "rloo",
            "f = Estimator(advantages=lambda experience, settings: 1 / 0)",
            "f raises ZeroDivisionError in line 2",
        ),
        ("rloo", "f = Estimator()", "the Estimator has no function: set advantages"),
    ],
)
def test_an_estimator_that_fails_is_refused_before_anything_starts(command, source, reason, tmp_path) -> None:
    with pytest.raises(UsageError, match=reason):
        tried_estimator(resolve(command, advantage_estimator=own(tmp_path, source)))


def test_the_made_up_rollout_has_the_columns_of_the_run(tmp_path) -> None:
    code = own(
        tmp_path,
        "seen = []\n"
        "def function(experience, settings):\n"
        "    seen.append((experience, settings))\n"
        "    return experience.rewards_N, experience.rewards_N\n"
        "f = Estimator(advantages=function, critic=True, min_group=3, greedy=True, rewards_apart=True, steps='tokens')",
    )
    given = {"advantage_estimator": code, "prm_pretrain": "x", "bootstrap_truncated": "true"}
    for command, more in (("ppo", given), ("ppo", {"advantage_estimator": code, "n_samples_per_prompt": "5"})):
        config = resolve(command, **more)
        tried_estimator(config)
    (tried, settings), (other, _) = load_target(f"{tmp_path}/own.py:seen")
    assert type(settings) is type(config.policy)
    assert tried.groups_B.tolist() == [0, 0, 0, 1, 1, 1]
    assert tried.cu.tolist() == [0, 1, 3, 4, 6, 7, 9]
    assert tried.rewards_N.tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3, 0, 1, 4 / 3, 0, 5 / 3])
    assert tried.steps_N.isnan().tolist() == [True, True, False, False, True, False, False, True, False]
    assert len(tried.values_N) == 9
    assert len(tried.bootstrap_B) == len(tried.greedy_B) == len(tried.trained_B) == len(tried.parts[0][1]) == 6
    assert (len(other.groups_B), other.steps_N, other.bootstrap_B) == (10, None, None)


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("grpo", "reinforce:REINFORCE", r"the estimator of another command: use rlhf reinforce\+\+"),
        ("rloo", "group:GDPO", "use rlhf grpo"),
        ("rloo", "group:grpo", "grpo raises AttributeError on a made-up rollout: 'PolicyConfig' .*'advantage_std'"),
    ],
)
def test_a_built_in_estimator_of_another_command_is_refused(command, code, reason) -> None:
    with pytest.raises(UsageError, match=reason):
        tried_estimator(resolve(command, advantage_estimator=f"rlhf_cli.algorithms.estimators.{code}"))


def test_a_built_in_estimator_without_a_command_can_be_tried(tmp_path, monkeypatch) -> None:
    code = own(tmp_path, "f = Estimator('new', lambda experience, settings: experience.rewards_N)")
    monkeypatch.setitem(ESTIMATORS, "new", load_target(code))
    assert estimator_of(resolve("grpo", advantage_estimator=code)).min_group == 1


def test_a_built_in_function_may_be_part_of_an_estimator(tmp_path) -> None:
    code = own(
        tmp_path,
        "from rlhf_cli.algorithms.estimators.rloo import rloo\nf = Estimator(advantages=rloo, whiten=True)",
    )
    assert estimator_of(resolve("grpo", advantage_estimator=code)).whiten
    code = "rlhf_cli.algorithms.estimators.group:GRPO_PASSK"
    assert estimator_of(resolve("grpo", advantage_estimator=code)).name == code


def test_a_result_of_another_shape_ends_the_run(tmp_path) -> None:
    code = own(tmp_path, "def f(experience, settings): return experience.rewards_N[-24:]")
    function = estimator_of(resolve("grpo", advantage_estimator=code)).advantages
    assert function is not None
    longer = replace(EXPERIENCE, shaped_N=torch.ones(25), cu=torch.tensor([0, 25]))
    with pytest.raises(RunError, match=r"own.py:f must return advantages of shape \(25,\)"):
        function(longer, None)


def test_an_estimator_that_fails_is_named_before_a_model_that_does_not_exist(tmp_path, capsys) -> None:
    code = own(tmp_path, "def f(experience, settings): return settings.trim")
    flags = f"--pretrain {tmp_path}/none --prompt_data {tmp_path}/none --output {tmp_path}/run --reward_funcs exact"
    assert cli.main(["rloo", *flags.split(), "--advantage_estimator", code]) == 2
    assert f"--advantage_estimator {code}: f raises AttributeError in line 2" in capsys.readouterr().err


def test_names_of_another_tool_s_estimators_are_still_understood() -> None:
    known = {"advantage_estimator": 1, "preset": 1}
    done = translate(["--advantage_estimator", "dr_grpo"], command="grpo", known=known)
    assert done.words == ["--preset", "dr_grpo"]
    assert translate(["--advantage_estimator", "rloo"], command="grpo", known=known).problems
    done = translate(["--advantage_estimator", "own.py:f"], command="grpo", known=known)
    assert (done.words, done.notes) == (["--advantage_estimator", "own.py:f"], [])
    own, done = translate_settings({"advantage_estimator": "own.py:f"}, command="grpo", known=known)
    assert (own, done.notes) == ({"advantage_estimator": "own.py:f"}, [])
    assert translate_settings({"advantage_estimator": None}, command="grpo", known=known)[0] == {}
