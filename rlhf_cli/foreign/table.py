"""Translation table for commands and flags from other frameworks, read from flags.toml.

Each flag maps to `rlhf` settings, to nothing (not needed), or to an error that names the replacement. Flags that the
command supports under the same name are never translated.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.command_table import COMMANDS, ONLINE_TRAINING, POLICY_GRADIENT, TRAINING
from rlhf_cli.errors import listed


class Refused(ValueError):
    """A foreign flag without an equivalent. The message names the replacement."""


@dataclass(frozen=True, slots=True)
class Call:
    """The command line that contains a foreign flag. `values` holds the values for each flag."""

    command: str
    values: Mapping[str, list[str]]

    def value(self, *names: str) -> str | None:
        """Return the first value given for any of these flags, in this order."""
        return next((self.values[name][0] for name in names if self.values.get(name)), None)


_Settings = dict[str, list[str]]
"""`rlhf` settings: values by name; an empty list for a switch."""
_Meaning = Callable[[list[str], Call], _Settings | None]
"""Translates a foreign flag's values to settings, or to None if the flag is not needed."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A foreign flag with the number of values, `takes`; None consumes all up to the next flag."""

    takes: int | None
    meaning: _Meaning


OWN_AND_FOREIGN = ("advantage_estimator",)
"""Flags that accept external code in `rlhf` and names in other frameworks."""

_FOREIGN_ESTIMATORS: dict[str, tuple[str, _Settings]] = {
    "gae": ("ppo", {}),
    "reinforce": ("reinforce++", {}),
    "reinforce_baseline": ("reinforce++", {"baseline": ["group"]}),
    "group_norm": ("grpo", {}),
    "dr_grpo": ("grpo", {"preset": ["dr_grpo"]}),
    "rloo": ("rloo", {}),
}
_SAMPLING = (*ONLINE_TRAINING, "generate", "eval")
"""Commands that read prompts and sample."""


def _prompt_max_len(values: list[str], call: Call) -> _Settings:
    """OpenRLHF limits the prompt; `max_len` limits prompt plus response."""
    if "max_len" in call.values:
        raise Refused("--max_len is set too and limits prompt plus response; drop --prompt_max_len")
    # 1024 is OpenRLHF's default for the response.
    response = call.value("max_new_tokens", "generate_max_len") or "1024"
    if not (values and values[0].isdigit() and response.isdigit()):
        raise Refused("use --max_len, the limit for prompt plus response")
    return {"max_len": [str(int(values[0]) + int(response))]}


def _estimator(values: list[str], call: Call) -> _Settings | None:
    """Accept an estimator that matches the command, since the command selects the estimator."""
    # Imported here: plugins.py imports pydantic, which `rlhf --help` does not need.
    from rlhf_cli.config.plugins import is_target

    value = values[0] if values else ""
    if is_target(value):
        return {"advantage_estimator": values}
    if value not in _FOREIGN_ESTIMATORS:
        raise Refused(f"the command selects the estimator: rlhf {listed(POLICY_GRADIENT, 'or')}")
    command, settings = _FOREIGN_ESTIMATORS[value]
    if command != call.command:
        flags = "".join(f" --{name} {' '.join(words)}" for name, words in settings.items())
        raise Refused(f"the command selects the estimator; for {value}, run rlhf {command}{flags}")
    return settings or None


def _correction_threshold(values: list[str], call: Call) -> _Settings:
    """Translate OpenRLHF's bounds: token_clip uses the upper one as cap, masks keep ratios between both."""
    masks = call.value("vllm_is_correction_type") in ("icepop", "seq-mask-tis") or "use_icepop" in call.values
    if masks and len(values) == 2:
        return {"rollout_correction_range": values}
    return {"rollout_correction_cap": values[-1:]}


def _frozen_offload(values: list[str], call: Call) -> _Settings | None:
    """Translate to --ref_offload, the one setting for all frozen models. It may be set already."""
    return None if "ref_offload" in call.values else {"ref_offload": []}


def _muon_lr(values: list[str], call: Call) -> None:
    """Reject a separate learning rate for Muon. Without --optim muon, OpenRLHF ignores the flag too."""
    if call.value("optim") == "muon":
        raise Refused("--optim muon scales updates to AdamW's size: use one learning rate for both")


def _without_critic(values: list[str], call: Call) -> None:
    from rlhf_cli.algorithms.estimators.table import ESTIMATORS  # `rlhf --help` needs no pydantic

    row = ESTIMATORS.get(COMMANDS[call.command].estimator) if call.command in COMMANDS else None
    if row is not None and row.critic:
        raise Refused("there is no setting with this name")


def _epochs(values: list[str], call: Call) -> _Settings:
    """Translate TRL's epochs, which may be written as `3.0`, to whole numbers."""
    whole = [value.removesuffix(".0") for value in values]
    return {"num_episodes" if call.command in _SAMPLING else "max_epochs": whole}


def _dataset(values: list[str], call: Call) -> _Settings:
    """Translate `--data FILE`. In a file of verl, `data` is a section."""
    if values and values[0].startswith("{"):
        raise Refused(FLAT)
    return {"prompt_data" if call.command in _SAMPLING else "dataset": values}


def _peft(values: list[str], call: Call) -> None:
    is_off = bool(values) and values[0].lower() == "false"
    if not is_off and not {"lora_r", "lora_rank"} & call.values.keys():
        raise Refused("use --lora_rank; a rank above 0 trains an adapter")


def _vllm(values: list[str], call: Call) -> _Settings:
    is_off = bool(values) and values[0].lower() == "false"
    return {"rollout_backend": ["transformers" if is_off else "vllm"]}


FUNCTIONS: dict[str, _Meaning] = {
    "prompt_max_len": _prompt_max_len,
    "estimator": _estimator,
    "correction_threshold": _correction_threshold,
    "frozen_offload": _frozen_offload,
    "muon_lr": _muon_lr,
    "without_critic": _without_critic,
    "epochs": _epochs,
    "peft": _peft,
    "vllm": _vllm,
    "dataset": _dataset,
    "learning_rate": lambda values, call: {
        "actor_learning_rate" if call.command in ONLINE_TRAINING else "learning_rate": values
    },
    # In LLaMA-Factory, `all` means all linear layers.
    "linear_layers": lambda values, call: {"target_modules": ["all-linear" if values == ["all"] else ",".join(values)]},
    "layers": lambda values, call: {"target_modules": [",".join(values)]},
}
"""Functions for flags whose meaning depends on the command or on other flags, by their name in flags.toml."""


_Entry = str | Mapping[str, str | list[float]]
"""A flag's meaning, as described in flags.toml."""


def _settings(text: str, values: list[str]) -> _Settings | None:
    """Return the settings for a text in flags.toml. Raises Refused if it is a reason."""
    if not text:
        return None
    if not text.startswith("--"):
        raise Refused(text)
    settings: _Settings = {}
    for flag in text.removeprefix("--").split(" --"):
        name, *own = flag.split()
        settings[name] = own
    # A new name alone keeps the values.
    return settings if " " in text else {text.removeprefix("--"): values}


def _meaning(entry: _Entry) -> _Meaning:
    match entry:
        case str(text):
            return lambda values, call: _settings(text, values)
        case {"function": str(name)}:
            return FUNCTIONS[name]
        case {"only": list(allowed), "else": str(reason)}:
            return lambda values, call: _only(values, allowed, reason)
    texts = {value: text for value, text in entry.items() if isinstance(text, str)}
    return lambda values, call: _by_value(values or [""], texts)


def _only(values: list[str], allowed: list[float], reason: str) -> None:
    try:
        fits = float(values[0]) in allowed
    except (ValueError, IndexError):
        fits = False
    if not fits:
        raise Refused(reason)


def _by_value(values: list[str], entry: Mapping[str, str]) -> _Settings | None:
    merged: _Settings | None = None
    for value in values:
        if value not in entry or value == "else":
            raise Refused(entry.get("else", f"{value!r} is not one of {', '.join(entry)}"))
        settings = _settings(entry[value], [])
        merged = settings if merged is None else merged | (settings or {})
    return merged


_TAKES = {"switches": 0, "values": 1, "lists": None}


def _flags(section: Mapping[str, Mapping[str, _Entry]]) -> dict[str, Foreign]:
    return {
        name: Foreign(_TAKES[kind], _meaning(entry))
        for kind, entries in section.items()
        for names, entry in entries.items()
        for name in names.split()
    }


def _of_command(command: str) -> dict[str, Foreign]:
    shared = _SEQUENCES if command in (*TRAINING, "data") else {}
    return shared | (_LAYERS if command in TRAINING else {}) | _flags(_READ["command"].get(command, {}))


_TEXT = Path(__file__).with_name("flags.toml").read_text(encoding="utf-8")
_READ = tomllib.loads(
    _TEXT.replace("{one_of_policy_gradient}", listed(POLICY_GRADIENT, "or")).replace(
        "{policy_gradient}", listed(POLICY_GRADIENT)
    )
)
COMMANDS_ELSEWHERE: dict[str, str] = _READ["command_names"]
"""`rlhf` commands by their names in other frameworks."""
SECTIONS: tuple[str, ...] = tuple(_READ["sections"]["names"].split())
"""Sections in verl's and EasyR1's settings."""
FLAT: str = _READ["sections"]["reason"]
SECTION = Foreign(None, _meaning(FLAT))
"""The meaning of a section, and of a setting in one."""
TABLE = _flags(_READ["all"])
"""Flags with one meaning in all commands."""
_SEQUENCES, _LAYERS = _flags(_READ["sequence_parallel"]), _flags(_READ["tensor_parallel"])
OF_COMMAND = {command: _of_command(command) for command in COMMANDS}
"""Flags with a different meaning, or with any meaning, only in one command."""

_OPENRLHF = _READ["openrlhf"]
FLAT_NAMES: dict[str, str] = {
    **{f"{section}.{name}": name for section, names in _OPENRLHF["same"].items() for name in names.split()},
    **{
        f"{section}.{name}": f"{section.rpartition('.')[2]}_{name}"
        for section, names in _OPENRLHF["joined"].items()
        for name in names.split()
    },
    **_OPENRLHF["renamed"],
}
"""Flat name by sectioned name in OpenRLHF."""
