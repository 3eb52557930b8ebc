"""The flags of all commands match the frozen list, and each flag survives a round trip through YAML.

After an intended change: UPDATE_FLAGS=1 .venv/bin/python -m pytest tests/project/test_flags_frozen.py
"""

import difflib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model
from settings_files import from_yaml

from rlhf_cli import cli
from rlhf_cli.config.base import CommandConfig, Needs, SettingsGroup
from rlhf_cli.environment import fast_dtype
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import Flag, describe, flags_of
from rlhf_cli.options import build_config, to_yaml

FROZEN = Path(__file__).with_name("flags.txt")
UPDATE = "UPDATE_FLAGS=1 .venv/bin/python -m pytest tests/project/test_flags_frozen.py"
# Settings that a command needs besides its required ones, for checks that look at several settings at once.
ALSO_NEEDED = {"iteration": "1", "prompt_data": "x", "reward_funcs": "gsm8k"}
# Settings that are only valid together with others, which no `Needs` names.
TOGETHER: dict[str, dict[str, Any]] = {
    "best_metric_key": {"eval_dataset": "x"},
    "code_unsandboxed": {"reward_funcs": "code"},
    "environment": {"for": "ppo"},
    "environment_timeout": {"for": "ppo"},
    "expect": {"for": "ppo"},
    "eval_n_samples_per_prompt": {"eval_temperature": "0.7"},
    "format_prompt": {"lmbda": "1"},
    "gigpo_gamma": {"environment": "game.py"},
    "gigpo_weight": {"environment": "game.py"},
    "json": {"contamination": "x"},
    "judge_method": {"n_samples_per_prompt": "2", "temperature": "1"},
    "judge_rubric_key": {"judge": "http://10.0.0.5:8000/v1"},
    "k": {"n_samples_per_prompt": "9", "temperature": "1"},
    "max_restarts": {"save_steps": "5"},
    "max_turns": {"for": "ppo"},
    "min_p": {"temperature": "0.7"},
    "n_samples_per_prompt": {"temperature": "0.7"},
    "normalize_reward": {"reward_pretrain": "x"},
    "tasks": {"prompt_data": "", "reward_funcs": ""},
    "tasks_args": {"prompt_data": "", "reward_funcs": ""},
    "teacher_context_key": {"teacher_pretrain": "x", "lmbda": "1"},
    "prm_aggregation": {"n_samples_per_prompt": "9", "temperature": "1"},
    "prm_pretrain": {"n_samples_per_prompt": "9", "temperature": "1"},
    "prompt_template": {"lmbda": "1"},
    "reward_rows": {"for": "ppo"},
    "rewards": {"for": "ppo"},
    "top_k": {"temperature": "0.7"},
    "top_p": {"temperature": "0.7"},
    "turns": {"for": "ppo"},
    "unbiased_kl": {"kl_estimator": "k3"},
    "use_kl_loss": {"kl_estimator": "k3"},
}
# Valid values of settings whose type alone does not give one.
SAMPLES = {
    "critic_lambd": "0.5",
    "vllm_gpu_memory_utilization": "0.3",
    "image_size": "56",
    "advantage_estimator": "math:hypot",
    "best_metric_key": "eval/reward",
    "input_template": "User: {}",
    "k": "1,4",
    "prm_aggregation": "mean",
    "loss": "ipo,simpo",
    "loss_weights": "0.5",
    "reward_by_source": '{"mine": "math"}',
    "chat_template_kwargs": '{"enable_thinking": false}',
    "reward_func_args": '{"weight": 0.5}',
    "tracker": "operator:add",
    "teacher_by_source": '{"code": "code-model"}',
    "tasks": "lm_eval:gsm8k",
    "tasks_args": "--limit 3",
    "vllm_args": '{"max_num_seqs": 7}',
    "remote_rm_url": "http://10.0.0.5:5000/get_reward,https://grader/get_reward",
    "judge": "http://10.0.0.5:8000/v1,https://judges/v1",
    "judge_args": '{"max_tokens": 2048}',
    "judge_score_range": "1.0 5.0",
    "reward_funcs": "gsm8k,exact",
    "reward_weights": "0.5",
    "reward_clip_range": "-5 5",
    "rollout_correction_range": "0.25 4.0",
    "stop_properly_penalty_coef": "0.5",
}


def settings(name: str):
    cls = cli.COMMANDS[name].config_class
    return cls, flags_of(cls)


def described(config_cls: type[CommandConfig]) -> dict[str, str]:
    """Return type and default of each flag of a config class, in words."""
    return {flag.name: describe(flag) for flag in flags_of(config_cls).values()}


def defaults_of(group: type[SettingsGroup]) -> dict[str, str]:
    """Return type and default of each flag of a group, as the group's own class has them."""
    return described(create_model("Alone", __base__=CommandConfig, group=(group, ...)))


def bases_of(group: type[SettingsGroup]) -> list[type[SettingsGroup]]:
    return [base for base in group.__bases__ if issubclass(base, SettingsGroup) and base.model_fields]


def groups_of(config_cls: type[CommandConfig]) -> list[type[SettingsGroup]]:
    """Return the classes of the groups with any flag."""
    return [config_cls.group_class(group) for group in config_cls.model_fields if config_cls.supported(group)]


def left_out(config_cls: type[CommandConfig]) -> list[str]:
    """Return the flags of these groups that the command does not support, in none of its groups."""
    groups = [group for group in config_cls.model_fields if config_cls.supported(group)]
    names = {name for group in groups for name in config_cls.unsupported_in(group)}
    return sorted(f"--{name}" for name in names - flags_of(config_cls).keys())


def new_lines(found: dict[str, str], known: dict[str, str]) -> list[str]:
    return [f"  --{name} ({text})" for name, text in sorted(found.items()) if known.get(name) != text]


def vocabulary() -> str:
    """Return each group with the flags that it adds to its bases, then each command with its groups.

    Below a command are the flags of its groups that it does not support, and those whose default is another one than in
    their group.
    """
    listed: dict[str, list[str]] = {}
    commands: list[str] = []
    for name in sorted(cli.COMMANDS):
        config_cls = settings(name)[0]
        groups = groups_of(config_cls)
        inherited: dict[str, str] = {}
        for group in groups:
            inherited |= defaults_of(group)
            _list_group(group, listed)
        commands += [f"rlhf {name}: {' '.join(group.__name__ for group in groups)}"]
        commands += [f"  without {flag}" for flag in left_out(config_cls)]
        commands += new_lines(described(config_cls), inherited)
    return "\n".join([line for lines in listed.values() for line in lines] + commands) + "\n"


def _list_group(group: type[SettingsGroup], listed: dict[str, list[str]]) -> None:
    """Add the lines of a group behind the lines of its bases."""
    bases = bases_of(group)
    for base in bases:
        _list_group(base, listed)
    inherited = {name: text for base in reversed(bases) for name, text in defaults_of(base).items()}
    of = f"({', '.join(base.__name__ for base in bases)})" if bases else ""
    listed[group.__name__] = [f"{group.__name__}{of}", *new_lines(defaults_of(group), inherited)]


def expanded(text: str) -> set[str]:
    """Return a line for each flag of each command of a vocabulary, as the frozen file has them."""
    groups: dict[str, dict[str, str]] = {}
    flags: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("  "):
            flag, _, facts = line.strip().partition(" ")
            if flag == "without":
                del current[facts]
            else:
                current[flag] = facts
        elif line.startswith("rlhf "):
            name, _, members = line.removeprefix("rlhf ").partition(": ")
            current = flags[name] = {flag: facts for group in members.split() for flag, facts in groups[group].items()}
        else:
            name, _, members = line.rstrip(")").partition("(")
            bases = [groups[base] for base in reversed(members.split(", ")) if base]
            current = groups[name] = {flag: facts for base in bases for flag, facts in base.items()}
    return {f"{name} {flag} {facts}" for name, found in flags.items() for flag, facts in found.items()}


def test_the_flags_are_those_of_the_frozen_list():
    if os.environ.get("UPDATE_FLAGS"):
        FROZEN.write_text(vocabulary())
    changed = list(difflib.unified_diff(FROZEN.read_text().splitlines(), vocabulary().splitlines(), lineterm="", n=0))
    listed = "\n".join(changed[2:])
    assert not changed, f"the flags changed; if that is wanted: {UPDATE}\n{listed}"


def test_the_frozen_list_by_groups_has_every_flag_of_every_command():
    listed = {
        f"{name} --{flag} ({text})" for name in cli.COMMANDS for flag, text in described(settings(name)[0]).items()
    }
    assert expanded(FROZEN.read_text()) == listed, "if the change is intended, run this file with UPDATE_FLAGS=1"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_what_a_command_does_not_support_exists(name):
    cls = settings(name)[0]
    groups = set(cls.model_fields)
    assert cls.unsupported <= groups | {
        f"{group}.{field}" for group in groups for field in cls.group_class(group).model_fields
    }


def least(flags: dict[str, Flag]) -> dict[str, Any]:
    """The fewest settings a command runs with."""
    needed = {name: str((flag.choices or ("x",))[0]) for name, flag in flags.items() if flag.required}
    return needed | {name: value for name, value in ALSO_NEEDED.items() if name in flags}


def other_value(flag: Flag) -> str | list[str] | bool:
    """A valid value that is not the default."""
    if flag.name in SAMPLES and (flag.is_list or not flag.choices):
        return SAMPLES[flag.name].split() if flag.takes > 1 else SAMPLES[flag.name]
    if flag.choices:
        # The default of --param_dtype depends on the machine.
        return str(next(choice for choice in reversed(flag.choices) if choice not in (flag.default, fast_dtype()[0])))
    if flag.takes == 0:
        return not flag.default
    if flag.takes > 1:
        return ["0.25", "0.75"][: flag.takes]
    default = flag.default if isinstance(flag.default, int | float) else None
    if flag.annotation is int:
        return str(2 * default if default is not None and default > 0 else 3)
    if flag.annotation is float:
        # 1.5 stands for settings bounded by 1 from below
        return "1.5" if default is None else str((default or 0.5) / 2)
    return "other"


def tried_settings() -> dict[str, list[Flag]]:
    """Return the flags by the command that tries them: the first one with the flag's group, as YAML is by groups."""
    seen: set[tuple[object, str]] = set()
    tried: dict[str, list[Flag]] = {}
    for name in cli.COMMANDS:
        cls, flags = settings(name)
        places = {flag.name: (cls.model_fields[flag.group].annotation, flag.name) for flag in flags.values()}
        tried[name] = [flags[flag] for flag, place in places.items() if place not in seen]
        seen |= set(places.values())
    return tried


def unmet_condition(plain: CommandConfig, flag: Flag) -> Needs | None:
    """Return the condition of a setting, if the fewest settings do not meet it."""
    need = plain.group_class(flag.group).condition_of(flag.attribute)
    return None if need is None or need.is_met(getattr(plain, flag.group), plain) else need


def company_of(plain: CommandConfig, flag: Flag) -> dict[str, Any]:
    """Return the setting that a setting needs, by its condition."""
    need, cls = unmet_condition(plain, flag), type(plain)
    if need is None:
        return {}
    if need.values:
        return {need.setting: need.values[0]}
    return {need.setting: other_value(flags_of(cls)[need.setting])}


def conditional_settings() -> list[tuple[str, Flag]]:
    """Return the settings that need another one, with the command that tries them."""
    found = []
    for name, tried in tried_settings().items():
        cls, flags = settings(name)
        plain = build_config(cls, least(flags))
        found += [(name, flag) for flag in tried if unmet_condition(plain, flag)]
    return found


@pytest.mark.parametrize(("name", "flag"), conditional_settings(), ids=lambda value: str(getattr(value, "name", value)))
def test_a_setting_without_effect_is_refused(name, flag):
    cls, flags = settings(name)
    with pytest.raises(UsageError, match=f"{flag.name} needs --"):
        build_config(cls, least(flags) | {flag.name: other_value(flag)})


def rivals() -> list[tuple[str, Flag, Flag]]:
    """Return the pairs of settings that exclude each other, with the command that tries them."""
    found = []
    for name, tried in tried_settings().items():
        cls, flags = settings(name)
        found += [(name, flag, flags[other]) for flag in tried for other in excluded(cls, flag) if other in flags]
    return found


def excluded(cls: type[CommandConfig], flag: Flag) -> list[str]:
    return cls.group_class(flag.group).excluded_by(flag.attribute)


@pytest.mark.parametrize(("name", "flag", "other"), rivals(), ids=lambda value: str(getattr(value, "name", value)))
def test_settings_that_exclude_each_other_are_refused(name, flag, other):
    cls, flags = settings(name)
    plain = build_config(cls, least(flags))
    given = {flag.name: other_value(flag), other.name: other_value(other)}
    needed = TOGETHER.get(flag.name, {}) | company_of(plain, flag) | company_of(plain, other)
    with pytest.raises(UsageError, match=f"{flag.name} and {other.name} exclude each other"):
        build_config(cls, least(flags) | {key: value for key, value in needed.items() if key in flags} | given)


@pytest.mark.parametrize(("name", "tried"), tried_settings().items(), ids=list(cli.COMMANDS))
def test_every_setting_of_a_command_survives_yaml(name, tried, tmp_path):
    cls, flags = settings(name)
    file = tmp_path / "config.yaml"
    plain = build_config(cls, least(flags))
    file.write_text(to_yaml(plain))
    assert from_yaml(cls, file) == plain
    for flag in tried:
        together = {name: value for name, value in TOGETHER.get(flag.name, {}).items() if name in flags}
        given = together | company_of(plain, flag) | {flag.name: other_value(flag)}
        config = build_config(cls, least(flags) | given)
        file.write_text(to_yaml(config))
        assert from_yaml(cls, file) == config, f"--{flag.name}"
        assert config != plain, f"--{flag.name} changes nothing"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_flag_has_a_help_text_of_its_own(name):
    _, flags = settings(name)
    silent = [flag.name for flag in flags.values() if len(flag.help.split()) < 1]
    assert not silent
