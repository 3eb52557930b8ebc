"""Custom advantage estimators: the documented examples work, and invalid results are rejected."""

import pytest
import torch
from extending_page import page_file
from online_settings import resolve

from rlhf_cli import cli
from rlhf_cli.algorithms.advantages import compute_advantages, estimator_from_code
from rlhf_cli.algorithms.estimators.estimator import Experience
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.config.base import default_settings
from rlhf_cli.config.plugins import require_plugins
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.foreign.translation import translate, translate_settings
from rlhf_cli.options import from_yaml, to_yaml
from rlhf_cli.runs.online.checks import check_without_estimator
from rlhf_cli.runs.online.identity import settings_identity

# Five responses with one token each, except that the second has two; three belong to the first prompt.
EXPERIENCE = Experience(
    rewards_N=torch.tensor([1.0, 0.0, 5.0, 2.0, 4.0, 8.0]),
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
    estimator = estimator_from_code(config.policy.advantage_estimator, ESTIMATORS["rloo"])
    assert (estimator.name, estimator.min_group, estimator.whiten) == ("median_baseline.py:less_median", 2, False)
    found = compute_advantages(estimator, EXPERIENCE, settings=config.policy)
    torch.testing.assert_close(found.per_token_N, LESS_MEDIAN)
    assert found.returns_N is None


def test_the_page_s_row_states_its_needs(tmp_path) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    config = resolve("grpo", advantage_estimator=f"{path}:whitened")
    require_plugins(config)
    estimator = estimator_from_code(config.policy.advantage_estimator, ESTIMATORS["grpo"])
    assert estimator.min_group == 3
    found = compute_advantages(estimator, EXPERIENCE, settings=config.settings_of_code("advantage_estimator"))
    assert found.metrics == {"positive": pytest.approx(2 / 5)}
    assert found.per_token_N.mean().item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(UsageError, match="this command trains a critic, and critic is False"):
        estimator_from_code(config.policy.advantage_estimator, ESTIMATORS["ppo"])


def test_settings_of_the_command_s_estimator_are_refused_if_the_own_one_has_settings(tmp_path) -> None:
    path = page_file(tmp_path, "median_baseline.py")
    code = f"{path}:whitened"
    check_without_estimator(resolve("grpo", advantage_estimator=code, quantile="0.75", preset="dr_grpo"))
    check_without_estimator(resolve("grpo", advantage_estimator=f"{path}:less_median", advantage_std="none"))
    with pytest.raises(UsageError, match=r"--advantage_std: --advantage_estimator .* reads its own settings"):
        check_without_estimator(resolve("grpo", advantage_estimator=code, advantage_std="none"))


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
        "row = Estimator('own', lambda experience, settings: experience.rewards_N, Own, critic=True)\n"
    )
    with pytest.raises(UsageError, match=reason):
        resolve("ppo", advantage_estimator=f"{tmp_path}/own.py:row")


@pytest.mark.parametrize(
    ("row", "result", "reason"),
    [
        ("rloo", "experience.rewards_B", r"own.py:f must return advantages of shape \(6,\)"),
        ("rloo", "3.0", "must return advantages"),
        ("ppo", "experience.rewards_N", "must return returns"),
    ],
)
def test_a_result_of_another_form_is_refused(row, result, reason, tmp_path) -> None:
    (tmp_path / "own.py").write_text(f"def f(experience, settings): return {result}\n")
    function = estimator_from_code(f"{tmp_path}/own.py:f", ESTIMATORS[row]).advantages
    assert function is not None
    with pytest.raises(RunError, match=reason):
        function(EXPERIENCE, None)


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
