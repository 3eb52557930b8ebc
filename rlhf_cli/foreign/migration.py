"""Translates a program from another framework to a valid `rlhf` command.

Given settings and framework defaults are translated with the same table as in all commands. Settings rejected by the
table or the parser are left out, each with the reason.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from rlhf_cli.command_table import COMMANDS, ONLINE_TRAINING
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.flags import Flag, flags_of
from rlhf_cli.foreign.programs import FRAMEWORKS, Program
from rlhf_cli.foreign.shell import is_open
from rlhf_cli.foreign.translation import Translation, as_flag, translate, values_by_flag
from rlhf_cli.options import build_config

_PROMPT_ROOM = 1024
"""Prompt tokens, if the other framework has no limit."""
_MODEL = "$MODEL"
"""Placeholder for a model that is set in Python code."""
_REWARDS = (
    "reward_funcs",
    "reward_func",
    "reward_pretrain",
    "remote_rm_url",
    "environment",
    "agent_command",
    "teacher_pretrain",
)
_Values = dict[str, list[str]]
"""Command-line values by setting; `true` or `false` for a switch."""


@dataclass(slots=True)
class Migration:
    """An `rlhf` command with notes.

    - `settings`: translated settings, in help page order.
    - `refused`: given settings without an equivalent, with reasons.
    - `ignored`: given settings that are not needed.
    - `defaults`: framework defaults without an equivalent, with reasons.
    - `added`: flags that keep framework defaults.
    """

    program: Program
    settings: _Values
    refused: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def command_line(self) -> str:
        """Return the command, with one flag per line."""
        words = [" ".join(map(_quoted, _words(name, values))) for name, values in self.settings.items()]
        return " \\\n  ".join([f"rlhf {self.program.command}", *words])

    def notes(self) -> list[str]:
        """Return the notes to print."""
        framework = FRAMEWORKS[self.program.framework]
        lines = [f"{framework}, {self.program.called}: rlhf {self.program.command}"]
        lines += [f"not translated: {reason}" for reason in self.refused]
        lines += [f"default of {framework}, not translated: {reason}" for reason in self.defaults]
        lines += [f"defaults of {framework} that differ: {', '.join(self.added)}"] if self.added else []
        lines += [f"not needed: {', '.join(self.ignored)}"] if self.ignored else []
        return [*lines, *self.remarks]


def migrated(program: Program) -> Migration:
    """Return the `rlhf` command for a program.

    Raises:
        UsageError: the command rejects the settings, also after removing single settings.
    """
    flags = flags_of(COMMANDS[program.command].config_class)
    known = {name: flag.takes for name, flag in flags.items()}
    given = [word for name, value in program.settings.items() for word in as_flag(name, value)]
    others = [word for name, value in program.defaults.items() for word in as_flag(name, value)]
    own = translate(given, command=program.command, known=known, beside=others)
    default = translate(others, command=program.command, known=known, beside=given)
    result = Migration(
        program, {}, ignored=[word for word in _bare(own.not_needed) if not word.startswith("world_size")]
    )
    result.refused, result.defaults = _bare(own.problems), _bare(default.problems)
    result.remarks = [*program.notes, *dict.fromkeys([*own.remarks, *default.remarks])]
    values = _by_setting(own, flags, result.refused)
    added = {name: texts for name, texts in _by_setting(default, flags, []).items() if name not in values}
    _complete(values, added, flags, result)
    config = _accepted(planned_class(program.command), flags, values, added, result)
    _shorten(config, flags, values, added)
    merged = values | added
    result.settings = {name: merged[name] for name in flags if name in merged}
    result.added = [" ".join(_words(name, added[name])) for name in result.settings if name in added]
    result.remarks += _batches(program.command, config)
    return result


def as_yaml(migration: Migration) -> str:
    """Format settings as YAML for `--config`, with notes as comments."""
    flags = flags_of(COMMANDS[migration.program.command].config_class)
    typed = _typed(migration.settings, flags)
    config = build_config(planned_class(migration.program.command), typed)
    values = {name: to_jsonable_python(_value(config, flags[name])) for name in migration.settings}
    notes = "".join(f"# {note}\n" for note in migration.notes())
    return notes + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)


def _bare(problems: Sequence[str]) -> list[str]:
    return [problem.removeprefix("--") for problem in problems]


def _by_setting(done: Translation, flags: Mapping[str, Flag], refused: list[str]) -> _Values:
    """Group values by setting; unknown flags are added to `refused`."""
    values: _Values = {}
    for name, texts in values_by_flag(done.words).items():
        own = name if name in flags else name.removeprefix("no_")
        if own not in flags:
            refused.append(f"{' '.join([name, *texts])}: no setting has this name, and none is known to replace it")
        elif flags[own].takes == 0:
            values[own] = ["true" if own == name else "false"]
        elif flags[own].is_list:
            values[own] = [",".join(texts)]
        elif len(texts) == flags[own].takes:
            values[own] = texts
        elif texts[: flags[own].takes] == texts[-flags[own].takes :]:
            values[own] = texts[: flags[own].takes]  # two foreign flags have the same meaning, and agree
        else:
            refused.append(f"{name} {' '.join(texts)}: must have {flags[own].takes} value")
    return values


def _complete(values: _Values, added: _Values, flags: Mapping[str, Flag], result: Migration) -> None:
    """Add required settings that are only set in Python code, and missing length limits."""
    program, stands_for = result.program, {"pretrain": _MODEL, "teacher_pretrain": "$TEACHER", "output": ""}
    both = values | added
    for name, flag in flags.items():
        if flag.required and name not in both:
            text = stands_for.get(name, "$DATA")
            if name == "output":
                values[name] = [f"runs/{(both.get('wandb_run_name') or [program.command])[0].replace('/', '_')}"]
            else:
                values[name] = [text]
                result.remarks.append(f"--{name} is not in the settings: set {text.removeprefix('$')}")
    if program.command not in ONLINE_TRAINING:
        return
    if not any(name in both for name in _REWARDS):
        result.remarks.append(f"no reward is in the settings: add {listed([f'--{name}' for name in _REWARDS], 'or')}")
        for name in [name for name in both if flags[name].group == "reward"]:
            added.pop(name, None)
            if name in values:
                result.refused.append(f"{' '.join([name, *values.pop(name)])}: applies to rewards, and none is set")
    if "max_len" not in both and (longest := both.get("max_new_tokens")) and longest[0].isdecimal():
        added["max_len"] = [str(int(longest[0]) + _PROMPT_ROOM)]
        result.remarks.append(f"--max_len leaves {_PROMPT_ROOM:,} tokens for the prompt, which had no limit")
    if "max_new_tokens" not in both and (longest := both.get("max_len")) and longest[0].isdecimal():
        added["max_new_tokens"] = [str(max(1, int(longest[0]) // 2))]
        result.remarks.append("--max_new_tokens is half of --max_len, because responses had no limit of their own")


def _accepted(
    config_cls: type[CommandConfig], flags: Mapping[str, Flag], values: _Values, added: _Values, result: Migration
) -> CommandConfig:
    """Build the config. Rejected settings are removed, with the reason in `result`."""
    while True:
        try:
            return build_config(config_cls, _typed(values | added, flags))
        except UsageError as error:
            text = str(error)
            name = _culprit(text, config_cls, flags, values, added)
            if name is None:
                program = result.program
                raise UsageError(f"{program.called}: rlhf {program.command} rejects its settings: {text}") from None
            reason = next(part for part in text.split("; ") if name in part or part == text.split("; ")[-1])
            if name in added:
                del added[name]
            else:
                texts, reason = values.pop(name), reason.removeprefix("--")
                result.refused.append(reason if reason.startswith(name) else f"{' '.join([name, *texts])}: {reason}")


def _culprit(
    text: str, config_cls: type[CommandConfig], flags: Mapping[str, Flag], values: _Values, added: _Values
) -> str | None:
    """Return the setting in an error message whose removal changes the error, framework defaults first."""
    named = [name for name in re.findall(r"\w+", text) if name in flags and not flags[name].required]
    both = values | added
    candidates = [name for name in named if name in added] + [name for name in named if name in values]
    for name in candidates:
        try:
            build_config(config_cls, _typed({own: both[own] for own in both if own != name}, flags))
        except UsageError as error:
            # A message may use the name of another setting as a word: "temperature 0 generates ...".
            if str(error) == text:
                continue
        return name
    return None


def _shorten(config: CommandConfig, flags: Mapping[str, Flag], values: _Values, added: _Values) -> None:
    """Remove framework defaults that equal the command's defaults."""
    full = dict(added)
    for name in list(added):
        if _value(config, flags[name]) == flags[name].default:
            del added[name]
    # Some defaults depend on other settings.
    shorter = build_config(planned_class(type(config).command), _typed(values | added, flags))
    for name in full.keys() - added.keys():
        if _value(shorter, flags[name]) != _value(config, flags[name]):
            added[name] = full[name]


def _value(config: CommandConfig, flag: Flag) -> Any:
    return getattr(getattr(config, flag.group), flag.attribute)


def _typed(values: _Values, flags: Mapping[str, Flag]) -> dict[str, object]:
    """Convert values for `build_config`."""
    return {
        name: texts[0] == "true" if flags[name].takes == 0 else tuple(texts) if flags[name].takes > 1 else texts[0]
        for name, texts in values.items()
    }


def _words(name: str, texts: Sequence[str]) -> list[str]:
    if texts in (["true"], ["false"]):
        return [f"--{name}" if texts == ["true"] else f"--no_{name}"]
    return [f"--{name}", *texts]


def _quoted(word: str) -> str:
    """Quote a word for the shell, such that unresolved variables are still expanded."""
    if is_open(word):
        return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def _batches(command: str, config: CommandConfig) -> Iterator[str]:
    """Describe batch sizes for online commands."""
    if command in ONLINE_TRAINING:
        prompts, each = config.setting("rollout_batch_size"), config.setting("n_samples_per_prompt")
        size = min(config.setting("train_batch_size"), prompts * each)
        steps = ceil(prompts * each / size) * config.setting("max_epochs")
        yield (
            f"batches: {prompts:,} prompts x {each} responses per iteration, {size:,} responses per optimizer step, "
            f"{steps:,} step{'s' if steps > 1 else ''} per iteration"
        )
