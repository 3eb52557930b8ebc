"""Replace the words of other tools' commands: accepted, rewritten with a note, or refused with their replacement."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_cli.foreign.openrlhf import FLAT_NAMES
from rlhf_cli.foreign.table import FLAT, OF_COMMAND, OWN_AND_FOREIGN, SECTIONS, TABLE, Call, Foreign, Refused


@dataclass(slots=True)
class Translation:
    """Words that this program knows, with notes about the others."""

    words: list[str] = field(default_factory=list)
    automatic: list[str] = field(default_factory=list)
    """Switches given as `auto`; Click parses a switch as true or false, so `auto` is set after parsing."""
    not_needed: list[str] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Lines for the start of the run."""
        listed = [f"not needed here: {', '.join(self.not_needed)}"] if self.not_needed else []
        return [*listed, *self.rewritten]


def translate(words: Sequence[str], *, command: str, known: Mapping[str, int]) -> Translation:
    """Replace the foreign flags among a command's words.

    Args:
        known: flags of the command itself, each with the number of values that it takes.
    """
    done = Translation()
    rest = _without_sections(words, done)
    call, sectioned = Call(command, _values_by_flag(rest)), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, inline = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
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
        elif not word.startswith("-") and _is_of_a_section(word):
            sectioned.append(word)
        elif not (word.startswith("--") and _takes_own_form(name, behind, done)):
            done.words.append(word)
    if sectioned:
        done.problems.append(f"{', '.join(sectioned)}: these are words of verl; {FLAT}")
    given = _values_by_flag(done.words)
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
    """Replace the foreign names and forms among the settings of a YAML file.

    Args:
        beside: settings of the other files of the same call.
        typed: settings that the command line gives, which go before the file's.
    """
    done = Translation()
    values = _settings_without_sections(values, done)
    listed = {name: _listed(value) for name, value in values.items()}
    others = {name: _listed(value) for name, value in (beside or {}).items() if value is not None}
    call, own = Call(command, others | listed), {}
    for name, value in values.items():
        foreign = _foreign(name, known, command)
        if isinstance(value, str) and _takes_own_form(name, [value], done):
            continue
        if foreign is None:
            own[name] = value
        elif value is not False and value is not None:  # a switch of another tool that is off, or nothing
            _apply(name, foreign, [] if value is True else listed[name], call, done, known)
    given = others | {name: _listed(value) for name, value in own.items() if value is not None}
    given |= _values_by_flag(done.words) | {name: _listed(value) for name, value in (typed or {}).items()}
    _model_without_output(given, done, known)
    _template_without_chat(given, done, known)
    for name, words in _values_by_flag(done.words).items():
        if name not in known and name.removeprefix("no_") in known:
            own.setdefault(name.removeprefix("no_"), False)
        else:
            own.setdefault(name, words[0] if len(words) == 1 else words or True)
    return own, done


def _takes_own_form(name: str, values: list[str], done: Translation) -> bool:
    """Translate values that a setting has in another tool's form, and take them off; true, false or null is none."""
    if name not in OWN_FORMS or not any(values[:1]) or values[0].startswith("-") or values[0].lower() in SWITCH_WORDS:
        return False
    return OWN_FORMS[name](values, done)


def _has_switch_word(behind: list[str]) -> bool:
    return bool(behind) and behind[0].lower() in ("true", "false")


def _switch(name: str, value: str, done: Translation) -> None:
    """Write a switch of this program's own for one with a value, as TRL's command lines have them."""
    own = f"--{name}" if value.lower() == "true" else f"--no_{name}"
    done.words.append(own)
    done.rewritten.append(f"--{name} {value} is {own} here")


def _is_of_a_section(word: str) -> bool:
    """Return whether a word is a setting of verl's or EasyR1's, `data.train_files=rows.parquet`."""
    name, equals, _ = word.lstrip("+~").partition("=")
    section, dot, _ = name.partition(".")
    return bool(equals and dot) and section in SECTIONS


def _is_switched_off(behind: list[str]) -> bool:
    """Take the value off that TRL's command lines write behind a switch, and return whether it is false."""
    return bool(behind) and behind[0].lower() in SWITCH_WORDS and behind.pop(0).lower() != "true"


def _listed(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _foreign(name: str, known: Mapping[str, int], command: str) -> Foreign | None:
    is_own = name in known or name.removeprefix("no_") in known
    if is_own and name not in OWN_AND_FOREIGN:
        return None
    return OF_COMMAND.get(command, {}).get(name) or TABLE.get(name) or TABLE.get(name.partition(".")[0])


def _without_sections(words: Sequence[str], done: Translation) -> list[str]:
    """Replace OpenRLHF's flags with sections, `--actor.adam.lr`, by its earlier names, which are mostly ours."""
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
    """Replace OpenRLHF's names with sections among the settings of a file."""
    replaced = {name: FLAT_NAMES[name] for name in values if name in FLAT_NAMES}
    for name, own in replaced.items():
        if own in values:
            done.problems.append(f"{name}: {own} is given too, which is the same setting")
    _note_sections(replaced, done)
    return {replaced.get(name, name): value for name, value in values.items()}


def _note_sections(replaced: Mapping[str, str], done: Translation) -> None:
    if replaced:
        pairs = ", ".join(f"--{name} is --{own}" for name, own in replaced.items())
        done.rewritten.append(f"names have no sections here: {pairs}")


def _take(rest: list[str], count: int | None) -> list[str]:
    """Take the values of a flag off the words that follow it."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (count is None or len(values) < count):
        values.append(rest.pop(0))
    return values


def _apply(
    name: str, foreign: Foreign, values: list[str], call: Call, done: Translation, known: Mapping[str, int]
) -> None:
    """Add the meaning of a foreign word to the translation, or the reason for which it has none."""
    try:
        settings = foreign.meaning(values, call)
        for setting in settings or {}:
            if setting not in known and setting.removeprefix("no_") not in known:
                raise Refused(f"this is --{setting} here, which rlhf {call.command} does not have")
    except Refused as refusal:
        done.problems.append(f"--{name}: {refusal}")
        return
    written = " ".join([f"--{name}", *values])
    if settings is None:
        done.not_needed.append(written)
        return
    words = [word for setting, own in settings.items() for word in (f"--{setting}", *own)]
    done.words += words
    if " ".join(words) != written:
        done.rewritten.append(f"{written} is {' '.join(words)} here")


WANDB_KEY = "WANDB_API_KEY"


def _wandb_key(rest: list[str], done: Translation) -> bool:
    """Put a key of W&B into the environment alone: command lines are shown and kept."""
    os.environ[WANDB_KEY] = rest.pop(0)
    done.rewritten.append(f"the key after --use_wandb is taken as {WANDB_KEY}; export it instead of writing it down")
    done.words.append("--use_wandb")
    return True


def _tensorboard_folder(rest: list[str], done: Translation) -> bool:
    done.rewritten.append(f"TensorBoard's files go to the output, not to {rest.pop(0)}")
    done.words.append("--use_tensorboard")
    return True


def _list_of(name: str) -> Callable[[list[str], Translation], bool]:
    """Return what joins the words of a list, which other tools separate by spaces and this program by commas."""

    def join(rest: list[str], done: Translation) -> bool:
        done.words += [f"--{name}", ",".join(_take(rest, None))]
        return True

    return join


def _reward_file(rest: list[str], done: Translation) -> bool:
    if not rest[0].endswith(".py"):
        return False
    file = rest.pop(0)
    done.rewritten.append(f"--remote_rm_url {file} is --reward_func {file} here")
    done.words += ["--reward_func", file]
    return True


def _warmup_share(rest: list[str], done: Translation) -> bool:
    """Take a number below 1 as the share of all steps, as transformers does."""
    try:
        is_share = 0 < float(rest[0]) < 1
    except ValueError:
        return False
    if is_share:
        done.rewritten.append(f"--warmup_steps {rest[0]} is --lr_warmup_ratio {rest[0]} here")
        done.words += ["--lr_warmup_ratio", rest.pop(0)]
    return is_share


OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    "adamw_anyprecision": "adamw_bf16",
    **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Names of optimizers in OpenRLHF and transformers, with their names here."""


def _optimizer(rest: list[str], done: Translation) -> bool:
    """Replace another tool's name of an optimizer."""
    if rest[0] not in OPTIMIZERS:
        return False
    name = rest.pop(0)
    done.rewritten.append(f"--optim {name} is --optim {OPTIMIZERS[name]} here")
    done.words += ["--optim", OPTIMIZERS[name]]
    return True


SWITCH_WORDS = ("true", "false", "null")
"""Words that switch a setting, in files and on TRL's command lines."""
OWN_FORMS: dict[str, Callable[[list[str], Translation], bool]] = {
    "use_wandb": _wandb_key,
    "use_tensorboard": _tensorboard_folder,
    **{name: _list_of(name) for name in ("target_modules", "exclude_modules", "reward_funcs", "reward_weights")},
    "remote_rm_url": _reward_file,
    "warmup_steps": _warmup_share,
    "optim": _optimizer,
}
"""Flags of this program that have another form elsewhere: each takes that form off the words, or leaves them."""


def _values_by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, inline = word.removeprefix("--").partition("=")
            values = found.setdefault(name.replace("-", "_"), [])
            values += [inline] if equals else []
        else:
            values.append(word)
    return found


def _model_without_output(given: Mapping[str, list[str]], done: Translation, known: Mapping[str, int]) -> None:
    """Give a run that names its model alone, as OpenRLHF's, a folder beside the model for its other files."""
    if {"output", "save_path"} <= known.keys() and "output" not in given and "config" not in given:
        path = next(iter(given.get("save_path", [])), None)
        if path:
            done.words += ["--output", f"{path.rstrip('/')}_run"]
            done.rewritten.append(f"the model goes to {path}, all other files of the run to {path.rstrip('/')}_run")


def _template_without_chat(given: Mapping[str, list[str]], done: Translation, known: Mapping[str, int]) -> None:
    """Switch the chat template off for an `input_template` alone: OpenRLHF uses a chat template only on request."""
    decided = given.keys() & {"apply_chat_template", "no_apply_chat_template", "config"}
    if "apply_chat_template" in known and "input_template" in given and not decided:
        done.words.append("--no_apply_chat_template")
        done.rewritten.append("--input_template takes the place of the chat template: --no_apply_chat_template")
