"""Translation table for commands and flags from other frameworks, read from flags.toml and sections.toml.

Each flag maps to `rlhf` settings, to nothing (not needed), or to an error that names the replacement. Flags that the
command supports under the same name are never translated.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.command_table import COMMANDS, ONLINE_TRAINING, POLICY_GRADIENT, TRAINING
from rlhf_cli.errors import listed
from rlhf_cli.foreign import batches, objectives, run_settings
from rlhf_cli.foreign.call import Call, Meaning, Refused, Settings, is_true


@dataclass(frozen=True, slots=True)
class Foreign:
    """A foreign flag with the number of values, `takes`; None consumes all up to the next flag."""

    takes: int | None
    meaning: Meaning


OWN_AND_FOREIGN = ("advantage_estimator",)
"""Flags that accept external code in `rlhf` and names in other frameworks."""

_SAMPLING = (*ONLINE_TRAINING, "generate", "eval")
"""Commands that read prompts and sample."""


def _prompt_max_len(values: list[str], call: Call) -> Settings:
    """OpenRLHF limits the prompt; `max_len` limits prompt plus response."""
    if "max_len" in call.values:
        raise Refused("--max_len is set too and limits prompt plus response; drop --prompt_max_len")
    # 1024 is OpenRLHF's default for the response.
    response = call.value("max_new_tokens", "generate_max_len") or "1024"
    if not (values and values[0].isdigit() and response.isdigit()):
        raise Refused("use --max_len, the limit for prompt plus response")
    return {"max_len": [str(int(values[0]) + int(response))]}


def _estimator(values: list[str], call: Call) -> Settings | None:
    """Accept an estimator that matches the command, since the command selects the estimator."""
    # Imported here: plugins.py imports pydantic, which `rlhf --help` does not need.
    from rlhf_cli.config.plugins import is_target

    value = values[0] if values else ""
    if is_target(value):
        return {"advantage_estimator": values}
    if value not in FOREIGN_ESTIMATORS:
        raise Refused(f"the command selects the estimator: rlhf {listed(POLICY_GRADIENT, 'or')}")
    command, settings = FOREIGN_ESTIMATORS[value]
    if command != call.command:
        flags = "".join(f" --{name} {' '.join(words)}" for name, words in settings.items())
        raise Refused(f"the command selects the estimator; for {value}, run rlhf {command}{flags}")
    return settings or None


def _correction_threshold(values: list[str], call: Call) -> Settings:
    """Translate OpenRLHF's bounds: token_clip uses the upper one as cap, masks keep ratios between both."""
    masks = call.value("vllm_is_correction_type") in ("icepop", "seq-mask-tis") or "use_icepop" in call.values
    if masks and len(values) == 2:
        return {"rollout_correction_range": values}
    return {"rollout_correction_cap": values[-1:]}


def _frozen_offload(values: list[str], call: Call) -> Settings | None:
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


def _epochs(values: list[str], call: Call) -> Settings:
    """Translate TRL's epochs, which may be written as `3.0`, to whole numbers."""
    whole = [value.removesuffix(".0") for value in values]
    return {"num_episodes" if call.command in _SAMPLING else "max_epochs": whole}


def _dataset(values: list[str], call: Call) -> Settings:
    """Translate `--data FILE`; a dataset config in TRL becomes `name:config`."""
    name = f"{values[0]}:{config}" if (config := call.value("dataset_config")) else values[0]
    return {"prompt_data" if call.command in _SAMPLING else "dataset": [name]}


def _dataset_config(values: list[str], call: Call) -> Settings | None:
    """Translate a dataset config in TRL with the dataset that it belongs to."""
    if (name := call.value("dataset_name")) is None:
        raise Refused("use --dataset or --prompt_data NAME:CONFIG")
    return _dataset([name], call)


def _peft(values: list[str], call: Call) -> None:
    is_off = bool(values) and values[0].lower() == "false"
    if not is_off and not {"lora_r", "lora_rank"} & call.values.keys():
        raise Refused("use --lora_rank; a rank above 0 trains an adapter")


def _vllm(values: list[str], call: Call) -> Settings:
    is_off = bool(values) and values[0].lower() == "false"
    return {"rollout_backend": ["transformers" if is_off else "vllm"]}


FUNCTIONS: dict[str, Meaning] = {
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
    "dataset_config": _dataset_config,
    "split": lambda values, call: {"prompt_split" if call.command in _SAMPLING else "dataset_split": values},
    "learning_rate": lambda values, call: {
        "actor_learning_rate" if call.command in ONLINE_TRAINING else "learning_rate": values
    },
    # In LLaMA-Factory, `all` means all linear layers.
    "linear_layers": lambda values, call: {"target_modules": ["all-linear" if values == ["all"] else ",".join(values)]},
    "layers": lambda values, call: {"target_modules": [",".join(values)]},
    "save_iterations": batches.trl_iterations("save_steps"),
    "eval_iterations": batches.trl_iterations("eval_steps"),
    **{
        function.__name__: function
        for function in (
            batches.accumulation,
            batches.critic_batch,
            batches.critic_epochs,
            batches.device_batch,
            batches.max_steps,
            batches.mini_batch,
            batches.oversampled,
            batches.prime_batch,
            batches.prime_length,
            batches.verl_length,
            batches.verl_prompts,
            batches.verl_warmup,
            batches.verl_warmup_share,
            batches.warmup_steps,
            objectives.adam_betas,
            objectives.adaptive_kl,
            objectives.filtered_range,
            objectives.overlong,
            objectives.prime_estimator,
            objectives.prime_loss,
            objectives.reference_share,
            objectives.reference_steps,
            objectives.schedule_options,
            objectives.trl_clip,
            objectives.trl_correction,
            objectives.trl_kl,
            objectives.trl_loss,
            objectives.trl_scale,
            objectives.verl_aggregation,
            objectives.verl_clip,
            objectives.verl_kl,
            objectives.verl_policy_loss,
            objectives.verl_schedule,
            run_settings.critic_clip,
            run_settings.critic_model,
            run_settings.critic_rate,
            run_settings.critic_warmup,
            run_settings.discount,
            run_settings.evaluated_rows,
            run_settings.evaluation,
            run_settings.filtered_rounds,
            run_settings.gae_lambda,
            run_settings.joined_data,
            run_settings.joined_evaluation,
            run_settings.kept_checkpoints,
            run_settings.loggers,
            run_settings.lora_alpha,
            run_settings.output_column,
            run_settings.prime_betas,
            run_settings.prime_model,
            run_settings.prime_staleness,
            run_settings.prime_teacher,
            run_settings.prompt_column,
            run_settings.reward_arguments,
            run_settings.reward_manager,
            run_settings.template_arguments,
            run_settings.template_path,
            run_settings.value_clip,
            run_settings.verl_correction,
            run_settings.verl_reward,
            run_settings.verl_std,
            run_settings.wandb_project,
        )
    },
}
"""Functions for flags whose meaning depends on the command or on other flags, by their name in flags.toml."""


_Entry = str | Mapping[str, str | list[float]]
"""A flag's meaning, as described in flags.toml."""


def _settings(text: str, values: list[str]) -> Settings | None:
    """Return the settings for a text in flags.toml. Raises Refused if it is a reason."""
    if not text:
        return None
    if not text.startswith("--"):
        raise Refused(text)
    # A new name alone keeps the values.
    return _own_settings(text.removeprefix("--")) if " " in text else {text.removeprefix("--"): values}


def _own_settings(text: str) -> Settings:
    """Return the settings in flags without the first dashes: `a 1 --b`."""
    return {name: own for name, *own in map(str.split, filter(None, text.split(" --")))}


def _meaning(entry: _Entry) -> Meaning:
    match entry:
        case str(text):
            return lambda values, call: _settings(text, values)
        case {"function": str(name)}:
            return FUNCTIONS[name]
        case {"switch": str(name)}:
            return lambda values, call: {name if not values or is_true(values[0]) else f"no_{name}": []}
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


def _by_value(values: list[str], entry: Mapping[str, str]) -> Settings | None:
    merged: Settings | None = None
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


_FOLDER = Path(__file__).parent
_READ = tomllib.loads(
    (_FOLDER / "flags.toml")
    .read_text(encoding="utf-8")
    .replace("{one_of_policy_gradient}", listed(POLICY_GRADIENT, "or"))
    .replace("{policy_gradient}", listed(POLICY_GRADIENT))
)
_IN_SECTIONS = tomllib.loads((_FOLDER / "sections.toml").read_text(encoding="utf-8"))
FOREIGN_ESTIMATORS: dict[str, tuple[str, Settings]] = {
    name: (text.split()[0], _own_settings(text.partition(" --")[2]))
    for names, text in _READ["estimators"].items()
    for name in names.split()
}
"""Command and settings by advantage estimator in other frameworks."""
COMMANDS_ELSEWHERE: dict[str, str] = _READ["command_names"]
"""`rlhf` commands by their names in other frameworks."""
SECTIONS: tuple[str, ...] = tuple(_READ["sections"]["names"].split())
"""Section names in verl, EasyR1 and prime-rl."""
NO_EQUIVALENT: str = _READ["sections"]["reason"]
TABLE = _flags(_READ["all"]) | _flags({kind: _IN_SECTIONS[kind] for kind in ("values", "lists")})
"""Flags with one meaning in all commands."""
BEGINNINGS = {name: Foreign(None, _meaning(entry)) for name, entry in _IN_SECTIONS["beginnings"].items()}
"""Meaning by name prefix, for settings in sections."""


def section_of(name: str) -> Foreign | None:
    """Return the meaning by section; None for unknown sections."""
    if begins := max(filter(name.startswith, BEGINNINGS), key=len, default=""):
        return BEGINNINGS[begins] if "." in name else None
    return Foreign(None, _meaning(NO_EQUIVALENT)) if name.partition(".")[0] in SECTIONS and "." in name else None


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
