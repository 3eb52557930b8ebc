"""Translates flags and settings from other frameworks: ignored, rewritten with a note, or rejected with a hint."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_cli.foreign.call import Call, Refused
from rlhf_cli.foreign.table import FLAT_NAMES, OF_COMMAND, OWN_AND_FOREIGN, SECTIONS, TABLE, Foreign, section_of


@dataclass(slots=True)
class Translation:
    """Translated command line arguments, with notes and problems."""

    words: list[str] = field(default_factory=list)
    automatic: list[str] = field(default_factory=list)
    """Switches set to `auto`. Click parses a switch as true or false, so `auto` is applied after parsing."""
    not_needed: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    written: set[tuple[str, ...]] = field(default_factory=set)
    """Emitted settings with values, since multiple foreign flags may determine one setting."""

    @property
    def notes(self) -> list[str]:
        """Notes to print when the command starts."""
        listed = [f"ignored, not needed: {', '.join(self.not_needed)}"] if self.not_needed else []
        return [*listed, *self.rewritten, *self.remarks]


def translate(
    words: Sequence[str], *, command: str, known: Mapping[str, int], beside: Sequence[str] = ()
) -> Translation:
    """Translate command line arguments.

    Args:
        known: the command's flags, each with the number of values.
        beside: additional arguments for context, which are not translated.
    """
    done = Translation()
    rest = _without_sections(_with_dashes(words), done)
    call = Call(command, values_by_flag(_without_sections(beside, Translation())) | values_by_flag(rest), done.remarks)
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        # The values that follow: `--name=value` has exactly one.
        behind = [inline] if equals else rest
        foreign = _foreign(name, known, command) if word.startswith("--") else None
        if foreign is not None:
            values = _take(behind, foreign.takes)
            if foreign.takes != 0 or not _is_switched_off(behind):
                _apply(name, foreign, values, call, done, known)
        elif word.startswith("--") and known.get(name) == 0 and _has_switch_word(behind):
            _switch(name, behind.pop(0), done)
        elif word.startswith("--") and known.get(name) == 0 and behind[:1] == ["auto"]:
            behind.pop(0)
            done.automatic.append(name)
        elif not (word.startswith("--") and _takes_own_form(name, behind, done)):
            done.words.append(word)
    # Last, because these depend on which flags are set after the translation.
    given = values_by_flag(done.words)
    _model_without_output(given, done, known)
    _template_without_chat(given, done, known)
    return done


def translate_settings(
    values: Mapping[str, object],
    *,
    command: str,
    known: Mapping[str, int],
    beside: Mapping[str, object] | None = None,
    typed: Mapping[str, object] | None = None,
) -> tuple[dict[str, object], Translation]:
    """Translate the settings in a YAML file.

    Args:
        beside: settings from the other files.
        typed: settings from the command line, which take precedence.
    """
    done = Translation()
    values = _settings_without_sections(flattened(values), done)
    listed = {name: _listed(value) for name, value in values.items()}
    others = {name: _listed(value) for name, value in (beside or {}).items() if value is not None}
    # The meaning of a flag may depend on others, wherever they are set.
    call, own = Call(command, others | listed, done.remarks), {}
    for name, value in values.items():
        foreign = _foreign(name, known, command)
        if isinstance(value, str) and _takes_own_form(name, [value], done):
            continue
        if foreign is None:
            own[name] = value
        # Missing values and switches set to false have no effect, except switches of verl, which are values.
        elif value is not None and (value is not False or foreign.takes != 0):
            _apply(name, foreign, [] if value is True else listed[name], call, done, known)
    given = others | {name: _listed(value) for name, value in own.items() if value is not None}
    given |= values_by_flag(done.words) | {name: _listed(value) for name, value in (typed or {}).items()}
    _model_without_output(given, done, known)
    _template_without_chat(given, done, known)
    for name, words in values_by_flag(done.words).items():
        # Settings written under their own names take precedence over translated ones.
        if name not in known and name.removeprefix("no_") in known:
            own.setdefault(name.removeprefix("no_"), False)
        else:
            own.setdefault(name, words[0] if len(words) == 1 else words or True)
    return own, done


def _takes_own_form(name: str, values: list[str], done: Translation) -> bool:
    """Translate and consume values in a foreign format. Returns False for native values."""
    # true, false and null set a switch; an empty value and a flag are not values at all.
    if name not in _OWN_FORMS or not any(values[:1]) or values[0].startswith("-") or values[0].lower() in _SWITCH_WORDS:
        return False
    return _OWN_FORMS[name](values, done)


def _has_switch_word(behind: list[str]) -> bool:
    return bool(behind) and behind[0].lower() in ("true", "false")


def _switch(name: str, value: str, done: Translation) -> None:
    """Translate a switch with a value, as on TRL command lines."""
    own = f"--{name}" if value.lower() == "true" else f"--no_{name}"
    done.words.append(own)
    done.rewritten.append(f"--{name} {value} is translated to {own}")


def _with_dashes(words: Sequence[str]) -> list[str]:
    """Rewrite verl arguments, `a.b=[1,2]`, as flags, `--a.b 1 2`. `a.b=null` is dropped."""
    flags: list[str] = []
    for word in words:
        if _is_of_a_section(word):
            name, _, value = word.lstrip("+~").partition("=")
            for inner, item in flattened({name: hydra_value(value)}).items():
                flags += as_flag(inner, item)
        else:
            flags.append(word)
    return flags


def as_flag(name: str, value: object) -> list[str]:
    """Format a setting as a flag with values; empty for None."""
    if value is None:
        return []
    return [f"--{name}", *_listed(value)] if isinstance(value, list) else [f"--{name}={_listed(value)[0]}"]


def hydra_value(text: str) -> object:
    """Parse a Hydra value: a list, a section, None, or text."""
    if not text.startswith(("[", "{")) and text not in ("null", "None", "~"):
        return text.strip("'\"")
    import yaml  # `rlhf --help` needs none

    try:
        # Hydra needs no space after the name of a setting: {n:4}.
        value: object = yaml.safe_load(re.sub(r"(\w):(?=[^\s/])", r"\1: ", text) if text.startswith("{") else text)
    except yaml.YAMLError:
        return text
    if isinstance(value, dict) and None in value.values():  # braces in a text
        return text
    return None if value == "None" else value


def flattened(values: Mapping[str, object]) -> dict[str, object]:
    """Flatten sections: `{"data": {"seed": 1}}` to `{"data.seed": 1}`."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.partition(".")[0] in SECTIONS:
            flat |= flattened({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            flat[name] = value
    return flat


def _is_of_a_section(word: str) -> bool:
    """Return whether an argument is a verl or EasyR1 setting, `data.train_files=rows.parquet`."""
    name, equals, _ = word.lstrip("+~").partition("=")
    section, dot, _ = name.partition(".")
    return bool(equals and dot) and section in SECTIONS


def _is_switched_off(behind: list[str]) -> bool:
    """Consume the value after a switch, as on TRL command lines, and return whether it is false."""
    return bool(behind) and behind[0].lower() in _SWITCH_WORDS and behind.pop(0).lower() != "true"


def _listed(value: object) -> list[str]:
    """Convert a value or list to text; switches and objects as JSON."""
    items = value if isinstance(value, list | tuple) else [value]
    return [json.dumps(item) if isinstance(item, bool | dict) else str(item) for item in items]


def _foreign(name: str, known: Mapping[str, int], command: str) -> Foreign | None:
    # A setting with the same name always wins, so that a table entry never hides a flag of `rlhf`.
    is_own = name in known or name.removeprefix("no_") in known
    if is_own and name not in OWN_AND_FOREIGN:
        return None
    return OF_COMMAND.get(command, {}).get(name) or TABLE.get(name) or section_of(name)


def _without_sections(words: Sequence[str], done: Translation) -> list[str]:
    """Replace OpenRLHF's sectioned flags, `--actor.adam.lr`, by the earlier flat names."""
    # First step: the tables below use flat names, and most of these are `rlhf` settings.
    flat: list[str] = []
    replaced: dict[str, str] = {}
    for word in words:
        name, equals, inline = word.removeprefix("--").partition("=")
        own = FLAT_NAMES.get(name.replace("-", "_")) if word.startswith("--") else None
        if own is not None:
            replaced[name] = own
        flat.append(word if own is None else f"--{own}{equals}{inline}")
    _note_sections(replaced, done)
    return flat


def _settings_without_sections(values: Mapping[str, object], done: Translation) -> dict[str, object]:
    """Replace OpenRLHF's sectioned names in a settings file."""
    replaced = {name: FLAT_NAMES[name] for name in values if name in FLAT_NAMES}
    for name, own in replaced.items():
        if own in values:
            done.problems.append(f"{name}: {own} is set too, which is the same setting")
    _note_sections(replaced, done)
    return {replaced.get(name, name): value for name, value in values.items()}


def _note_sections(replaced: Mapping[str, str], done: Translation) -> None:
    if replaced:
        pairs = ", ".join(f"--{name} is --{own}" for name, own in replaced.items())
        done.rewritten.append(f"flags without sections: {pairs}")


def _take(rest: list[str], count: int | None) -> list[str]:
    """Consume a flag's values, up to the next flag."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (count is None or len(values) < count):
        values.append(rest.pop(0))
    return values


def _apply(
    name: str, foreign: Foreign, values: list[str], call: Call, done: Translation, known: Mapping[str, int]
) -> None:
    """Add a foreign flag's translation, or the reason why it was rejected."""
    try:
        settings = foreign.meaning(values, call)
        for setting in settings or {}:
            if setting not in known and setting.removeprefix("no_") not in known:
                raise Refused(f"corresponds to --{setting}, which rlhf {call.command} does not support")
    except Refused as refusal:
        done.problems.append(f"--{name}: {refusal}")
        return
    written = " ".join([f"--{name}", *values])
    if settings is None:
        done.not_needed.append(written)
        return
    new = [(f"--{setting}", *own) for setting, own in settings.items()]
    words = [word for setting in new for word in setting]
    done.words += [word for setting in new if setting not in done.written for word in setting]
    done.written.update(new)
    # `--name=value` may translate to the same flag: no note then.
    if " ".join(words) != written:
        done.rewritten.append(f"{written} is translated to {' '.join(words)}")


WANDB_KEY = "WANDB_API_KEY"


def _wandb_key(rest: list[str], done: Translation) -> bool:
    """Move a W&B key to the environment."""
    # Command lines are printed and saved, so a key in them would leak.
    os.environ[WANDB_KEY] = rest.pop(0)
    done.remarks.append(f"the key after --use_wandb is used as {WANDB_KEY}; export that variable instead")
    done.words.append("--use_wandb")
    return True


def _tensorboard_folder(rest: list[str], done: Translation) -> bool:
    done.remarks.append(f"TensorBoard logs are written to the output folder, not to {rest.pop(0)}")
    done.words.append("--use_tensorboard")
    return True


_REWARDS = {
    **dict.fromkeys(("accuracy", "accuracy_reward"), "math"),
    **dict.fromkeys(("format_reward", "think_format_reward"), "format"),
    "reasoning_steps_reward": "reasoning_steps",
    "tag_count_reward": "tag_count",
}
"""Reward by name in TRL and Open R1."""


def _list_of(name: str) -> Callable[[list[str], Translation], bool]:
    """Return a function that joins list items, which other frameworks separate by spaces, with commas."""

    def join(rest: list[str], done: Translation) -> bool:
        items = _take(rest, None)
        if name == "reward_funcs":
            for item in [item for item in items if "." in item and ":" not in item]:
                items.remove(item)
                done.problems.append(f"--reward_funcs {item}: pass Python code as --reward_func FILE.py:NAME")
        own = [_REWARDS.get(item, item) for item in items] if name == "reward_funcs" else items
        if own != items:
            done.rewritten.append(f"--{name} {' '.join(items)} is translated to --{name} {','.join(own)}")
        done.words += [f"--{name}", ",".join(own)]
        return True

    return join


def _reward_file(rest: list[str], done: Translation) -> bool:
    # OpenRLHF accepts a Python file in place of a URL.
    if not rest[0].endswith(".py"):
        return False
    file = rest.pop(0)
    done.rewritten.append(f"--remote_rm_url {file} is translated to --reward_func {file}")
    done.words += ["--reward_func", file]
    return True


def _warmup_share(rest: list[str], done: Translation) -> bool:
    """Interpret a number below 1 as a fraction of all steps, like transformers."""
    try:
        is_share = 0 < float(rest[0]) < 1
    except ValueError:
        return False
    if is_share:
        done.rewritten.append(f"--warmup_steps {rest[0]} is translated to --lr_warmup_ratio {rest[0]}")
        done.words += ["--lr_warmup_ratio", rest.pop(0)]
    return is_share


_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    "adamw_anyprecision": "adamw_bf16",
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""`rlhf` optimizer by OpenRLHF or transformers name."""


def _optimizer(rest: list[str], done: Translation) -> bool:
    """Translate an optimizer name."""
    if rest[0] not in _OPTIMIZERS:
        return False
    name = rest.pop(0)
    done.rewritten.append(f"--optim {name} is translated to --optim {_OPTIMIZERS[name]}")
    done.words += ["--optim", _OPTIMIZERS[name]]
    return True


_SWITCH_WORDS = ("true", "false", "null")
"""Values for switches in files and on TRL command lines."""
_OWN_FORMS: dict[str, Callable[[list[str], Translation], bool]] = {
    "use_wandb": _wandb_key,
    "use_tensorboard": _tensorboard_folder,
    **{name: _list_of(name) for name in ("target_modules", "exclude_modules", "reward_funcs", "reward_weights")},
    "remote_rm_url": _reward_file,
    "warmup_steps": _warmup_share,
    "optim": _optimizer,
}
"""`rlhf` flags with a different value format elsewhere. Functions consume values in that format or return False."""


def values_by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    by_flag: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, inline = word.removeprefix("--").partition("=")
            values = by_flag.setdefault(name.replace("-", "_"), [])
            values += [inline] if equals else []
        else:
            values.append(word)
    return by_flag


def _model_without_output(given: Mapping[str, list[str]], done: Translation, known: Mapping[str, int]) -> None:
    """Add --output if only --save_path is set, as in OpenRLHF: a folder next to the model for all other files."""
    if {"output", "save_path"} <= known.keys() and "output" not in given and "config" not in given:
        path = next(iter(given.get("save_path", [])), None)
        if path:
            done.words += ["--output", f"{path.rstrip('/')}_run"]
            done.remarks.append(f"the model is written to {path}, all other files to {path.rstrip('/')}_run")


def _template_without_chat(given: Mapping[str, list[str]], done: Translation, known: Mapping[str, int]) -> None:
    """Disable the chat template if `input_template` is set, because OpenRLHF uses chat templates only on request."""
    decided = given.keys() & {"apply_chat_template", "no_apply_chat_template", "config"}
    if "apply_chat_template" in known and "input_template" in given and not decided:
        done.words.append("--no_apply_chat_template")
        done.remarks.append("--input_template replaces the chat template: added --no_apply_chat_template")
