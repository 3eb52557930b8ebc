"""Detects training programs from other frameworks, and collects settings from arguments and files."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.errors import UsageError, listed
from rlhf_cli.foreign.shell import commands_in
from rlhf_cli.foreign.table import COMMANDS_ELSEWHERE, FLAT_NAMES, FOREIGN_ESTIMATORS
from rlhf_cli.foreign.translation import hydra_value, values_by_flag
from rlhf_cli.settings_file import read_yaml

_T = TypeVar("_T")

FRAMEWORKS = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl", "easyr1": "EasyR1", "prime-rl": "prime-rl"}
"""Framework names by key in defaults.toml."""
DEFAULTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("defaults.toml").read_text(encoding="utf-8")
)
"""Defaults in other frameworks, by framework and command."""
_ACCEPTED = listed(FRAMEWORKS.values(), "or")

_OPENRLHF = re.compile(r"(?:.*[./])?(train_(?:sft|rm|prm|dpo|kto|kd|ppo|ppo_ray))(?:\.py)?")
_TRL_SCRIPT = re.compile(r"(?:.*[/_])?(sft|dpo|kto|grpo|rloo|reward|gkd)(?:_\w+|\w*_modeling)?\.py")
_TRL_TRAINER = re.compile(r"sft|dpo|kto|grpo|rloo|reward|gkd")
_VERL_SFT = re.compile(r"(?:.*[./])?(?:fsdp_|megatron_)?sft_trainer(?:\.py)?")
_PRIME_OPTION = re.compile(r"@|--(?:trainer|orchestrator|model)\.")
_PRIME_PARTS = ("--trainer", "--orchestrator", "--inference")
_SCRIPTS, _TABLES = (".sh", ".bash", ".slurm"), (".yaml", ".yml", ".toml")


@dataclass(slots=True)
class Program:
    """A training program from another framework.

    - `framework`: key in `FRAMEWORKS`.
    - `called`: module, script or file that was detected.
    - `command`: the `rlhf` command.
    - `settings`: given settings by foreign name.
    - `defaults`: framework defaults for all other settings.
    - `notes`: missing files, and assumptions.
    """

    framework: str
    called: str
    command: str
    settings: dict[str, object]
    defaults: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def programs_in(source: Sequence[str], *, num_gpus: int | None = None) -> list[Program]:
    """Return the training programs in files (shell script, YAML, TOML) or in a command line.

    Args:
        num_gpus: number of TRL processes, if the command line does not set it.

    Raises:
        UsageError: a file cannot be read, or contains no known program.
    """
    files = [Path(name) for name in source]
    if all(file.suffix in _TABLES for file in files):
        found = [_of_tables(files)]
    elif len(files) == 1 and files[0].suffix in _SCRIPTS:
        commands = _named(files[0], lambda: commands_in(_text_of(files[0])))
        found = [program for words in commands if (program := _of_words(words, files[0].parent))]
    else:
        found = [program] if (program := _of_words(list(source), Path())) else []
    if not found:
        where = source[0] if len(source) == 1 else "the command line"
        raise UsageError(f"{where}: contains no training command of {_ACCEPTED}")
    for program in found:
        _complete(program, num_gpus)
    return found


def _text_of(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError((error.strerror or str(error)).lower()) from None
    except UnicodeDecodeError:
        raise UsageError("not a UTF-8 text file") from None


def _named(file: Path, read: Callable[[], _T]) -> _T:
    """Call `read`, and prefix errors with the file name."""
    try:
        return read()
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file}: not TOML: {error}") from None


def _read_table(file: Path) -> dict[str, object]:
    """Read a YAML or TOML file. Raises UsageError with the file name."""
    if file.suffix == ".toml":
        return _named(file, lambda: tomllib.loads(_text_of(file)))
    return read_yaml(file.expanduser(), named=str(file))


def _of_tables(files: Sequence[Path]) -> Program:
    """Return the program for a settings file, or for separate files in prime-rl."""
    settings: dict[str, object] = {}
    if len({file.suffix == ".toml" for file in files}) > 1:
        raise UsageError(f"{', '.join(map(str, files))}: TOML and YAML are of different tools; pass one at a time")
    for file in files:
        settings |= _prime_part(file, _read_table(file)) if file.suffix == ".toml" else _read_table(file)
    called = ", ".join(map(str, files))
    if files[0].suffix == ".toml":
        return _prime(settings, called)
    if "actor_rollout_ref" in settings or "algorithm" in settings or "worker" in settings:
        return _verl(_without_hydra(settings), called, "easyr1" if "worker" in settings else "verl")
    if isinstance(settings.get("model"), dict) and "partial_pretrain" in str(settings["model"]):
        return Program("verl", called, "sft", _dotted(settings))
    kind = _trl_kind(settings, called)
    if kind is None:
        raise UsageError(f"{called}: contains no settings of {_ACCEPTED}")
    return Program("trl", called, COMMANDS_ELSEWHERE.get(kind, kind), settings)


def _trl_kind(settings: Mapping[str, object], called: str) -> str | None:
    """Return the TRL command for these settings, detected from the keys or the path."""
    if not settings.keys() & {"model_name_or_path", "per_device_train_batch_size", "output_dir", "dataset_name"}:
        return None
    if settings.keys() & {"num_generations", "reward_funcs", "scale_rewards"}:
        return "rloo" if "rloo" in called else "grpo"
    words = re.split(r"[^a-z]+", called.lower())
    if named := list(filter(_TRL_TRAINER.fullmatch, words)):
        return named[-1]
    if "max_completion_length" in settings:
        return "grpo"
    return "sft" if settings.keys() & {"packing", "assistant_only_loss", "max_seq_length"} else None


def _of_words(words: Sequence[str], folder: Path) -> Program | None:
    """Return the program in a command line, also after launchers; None for other commands."""
    for place, word in enumerate(words):
        before, after = words[:place], list(words[place + 1 :])
        if found := _OPENRLHF.fullmatch(word):
            if word.startswith("train_") or "openrlhf" in word:
                return _openrlhf(found[1], before, after)
        elif word == "trl" and after[:1] and _TRL_TRAINER.fullmatch(after[0]):
            return _trl(after[0], f"trl {after[0]}", before, after[1:], folder)
        elif (script := _TRL_SCRIPT.fullmatch(word)) and any(option.startswith("--") for option in after):
            return _trl(script[1], word, before, after, folder)
        elif _VERL_SFT.fullmatch(word) and before:
            return _verl_sft(word, before, after)
        elif word in ("rl", "prime-rl", "sft", "trainer", "orchestrator") and any(map(_PRIME_OPTION.match, after)):
            return _prime_words(word, after, folder)
        elif re.fullmatch(r"verl\.trainer\.main(?:\.py)?", word):
            return _verl_words(word, after, folder, "easyr1")
        elif re.fullmatch(r"(?:.*[./])?\w*main\w*(?:\.py)?", word) and _has_section(after, "actor_rollout_ref"):
            return _verl_words(word, after, folder, "verl")
    return None


def _has_section(words: Sequence[str], section: str) -> bool:
    return any(word.lstrip("+").startswith((f"{section}.", "algorithm.adv_estimator")) for word in words)


def _flags(words: Sequence[str]) -> dict[str, object]:
    """Parse `--name value` arguments: True without a value, a list for multiple values."""
    by_name = values_by_flag(words)
    return {name: True if not own else own[0] if len(own) == 1 else own for name, own in by_name.items()}


def _launched(before: Sequence[str], folder: Path) -> tuple[int | None, int]:
    """Return the number of processes (None if unknown) and nodes for a launcher."""
    given = _flags(before)
    nodes = _count(given, "nnodes", "num_nodes", "num_machines") or 1
    file = given.get("config_file")
    if isinstance(file, str) and (path := _found(file, folder)):
        table = _read_table(path)
        nodes = _count(given, "num_machines") or _count(table, "num_machines") or nodes
        given = table | given
    if total := _count(given, "num_processes"):
        return total, nodes
    if isinstance(included := given.get("include"), str) and ":" in included:
        return len(included.partition(":")[2].split(",")), nodes
    each = _count(given, "nproc_per_node", "num_gpus")
    if each is None and "python" in "".join(before[:1]):
        each = 1
    return None if each is None else each * nodes, nodes


def _count(given: Mapping[str, object], *names: str) -> int | None:
    # `--nproc_per_node=8 -m MODULE` has more words than the number.
    found = (value[0] if isinstance(value, list) and value else value for name in names if (value := given.get(name)))
    text = str(next(found, ""))
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _found(name: str, folder: Path) -> Path | None:
    """Find a file relative to the working directory, the script's folder or a parent folder."""
    path = Path(name).expanduser()
    places = [Path(), folder, *folder.resolve().parents]
    return next((place / path for place in places if (place / path).is_file()), None)


def _openrlhf(module: str, before: Sequence[str], after: Sequence[str]) -> Program:
    given = {FLAT_NAMES.get(name, name): value for name, value in _flags(after).items()}
    estimator = str(given.get("advantage_estimator", "gae"))
    if module in ("train_ppo_ray", "train_ppo"):
        command, extra = _command_of(estimator, "OpenRLHF")
        given.pop("advantage_estimator", None)
        return Program("openrlhf", module, command, extra | given)
    program = Program("openrlhf", module, COMMANDS_ELSEWHERE[module], given)
    total, nodes = _launched(before, Path())
    if total is None:
        program.notes.append("the number of processes is not given: 1 is assumed; add --num_processes N for N GPUs")
    _add_processes(program, total, nodes)
    return program


def _add_processes(program: Program, total: int | None, nodes: int) -> None:
    if total is not None and nodes == 1 and total > 1:
        program.settings["num_processes"] = total
    elif nodes > 1:
        program.notes.append(f"{nodes} nodes: start the command on each node with torchrun or the DeepSpeed launcher")


def _command_of(estimator: str, framework: str) -> tuple[str, dict[str, object]]:
    """Return the command and settings for an advantage estimator."""
    if estimator not in FOREIGN_ESTIMATORS:
        known = listed(FOREIGN_ESTIMATORS, "or")
        raise UsageError(f"no command has {framework}'s advantage estimator {estimator!r}; it must be {known}")
    command, settings = FOREIGN_ESTIMATORS[estimator]
    return command, {name: words[0] for name, words in settings.items()}


def _trl(kind: str, called: str, before: Sequence[str], after: Sequence[str], folder: Path) -> Program:
    given, notes = _flags(after), list[str]()
    if isinstance(file := given.pop("config", None), str):
        if path := _found(file, folder):
            given = _read_table(path) | given
        else:
            notes.append(f"the settings in {file} are missing: there is no such file here")
    total, nodes = _launched(before if "num_processes" not in given else after, folder)
    given.pop("num_processes", None)
    program = Program("trl", called, COMMANDS_ELSEWHERE.get(kind, kind), given, notes=notes)
    if total is not None:
        program.settings["world_size"] = total
    if program.command not in _online():
        _add_processes(program, total, nodes)
    return program


def _online() -> tuple[str, ...]:
    return tuple(name for name, entry in COMMANDS.items() if entry.panel == COMMANDS["grpo"].panel)


def _verl_words(called: str, after: Sequence[str], folder: Path, framework: str) -> Program:
    given: dict[str, object] = {}
    notes: list[str] = []
    options = _flags([word for word in after if "=" not in word or word.startswith("--")])
    named = options.get("config_name")
    if named and (path := _found(f"{options.get('config_path', '.')}/{named}.yaml", folder)):
        given |= _dotted(_without_hydra(_read_table(path)))
    elif named and str(named) not in ("ppo_trainer", "ppo_trainer.yaml"):
        notes.append(f"the settings in {named} are missing: there is no such file here")
    for word in after:
        name, equals, value = word.lstrip("+").partition("=")
        if framework == "easyr1" and name == "config":
            if path := _found(value, folder):
                given = _dotted(_read_table(path)) | given
            else:
                notes.append(f"{value} is not here: the values of EasyR1's examples/config.yaml are assumed")
                given = DEFAULTS["easyr1"]["example"] | given
        elif equals and "." in name and not word.startswith("-"):
            given[name] = hydra_value(value)
    program = _verl(given, called, framework)
    program.notes += notes
    return program


def _verl(given: dict[str, object], called: str, framework: str) -> Program:
    given = _dotted(given)
    default = "gae" if framework == "verl" else "grpo"
    estimator = str(given.pop("algorithm.adv_estimator", None) or default)
    command, extra = _command_of(estimator, FRAMEWORKS[framework])
    return Program(framework, called, command, extra | given)


def _verl_sft(called: str, before: Sequence[str], after: Sequence[str]) -> Program:
    given = {
        name.lstrip("+"): hydra_value(value)
        for name, equals, value in (word.partition("=") for word in after)
        if equals and not name.startswith("-")
    }
    program = Program("verl", called, "sft", _dotted(given))
    _add_processes(program, *_launched(before, Path()))
    return program


def _dotted(settings: Mapping[str, object]) -> dict[str, object]:
    """Flatten sections to names with dots."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        inner = _dotted({f"{name}.{own}": item for own, item in value.items()}) if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else inner
    return flat


def _without_hydra(settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in ("defaults", "hydra")}


def _prime_part(file: Path, table: dict[str, object]) -> dict[str, object]:
    """Nest a separate file for the orchestrator, trainer or engine in prime-rl under the section name."""
    if table.keys() & {"trainer", "orchestrator", "data"}:
        return table
    if not table.keys() & {"model", "optim", "max_steps", "batch_size", "env", "train", "server", "vllm", "seq_len"}:
        raise UsageError(f"{file}: contains no settings of prime-rl, whose sections are trainer and orchestrator")
    part = "orchestrator" if table.keys() & {"batch_size", "env", "train", "rollouts_per_example"} else None
    part = part or ("inference" if table.keys() & {"server", "vllm"} or "infer" in file.stem else "trainer")
    return {part: table}


def _prime(settings: dict[str, object], called: str) -> Program:
    given = _dotted(settings)
    parts = {name.partition(".")[0] for name in given}
    if not parts & {"trainer", "orchestrator", "data", "model"}:
        raise UsageError(f"{called}: contains no settings of prime-rl, whose sections are trainer and orchestrator")
    is_sft = "orchestrator" not in parts and "data" in parts
    for part in ("orchestrator", "trainer"):  # a common setting counts for all parts
        for name in ("max_steps", "monitors.wandb.project", "monitors.wandb.name"):
            if f"{part}.{name}" in given:
                given.setdefault(name, given.pop(f"{part}.{name}"))
    return Program("prime-rl", called, "sft" if is_sft else "grpo", given)


def _prime_words(called: str, after: Sequence[str], folder: Path) -> Program:
    tables: dict[str, object] = {}
    rest: list[str] = []
    words = iter(after)
    for word in words:
        if word.startswith("@"):
            name = word.removeprefix("@") or next(words, "")
            part = rest.pop().removeprefix("--") if rest and rest[-1] in _PRIME_PARTS else ""
            table = _read_table(_found(name, folder) or Path(name))
            tables |= {part: table} if part else _prime_part(Path(name), table)
        else:
            rest.append(word)
    return _prime(_dotted(tables) | _flags(rest), called)


def _complete(program: Program, num_gpus: int | None) -> None:
    """Add framework defaults, and the number of processes for TRL."""
    is_online = program.command in _online()
    parts = ["all", "online" if is_online else "", program.command]
    if program.command == "sft" and not program.called.rpartition(".")[2].startswith("fsdp_"):
        parts.append("engine")
    if program.framework == "trl":
        parts += _complete_trl(program, num_gpus, is_online=is_online)
    tables = DEFAULTS[program.framework]
    defaults = dict[str, object]()
    for part in parts:
        defaults |= tables.get(part, {})
    program.defaults = dict(_applicable(defaults, program.settings))


def _complete_trl(program: Program, num_gpus: int | None, *, is_online: bool) -> list[str]:
    """Set the number of processes, rename steps, and drop unused settings. Returns additional default sections."""
    given = program.settings
    if "world_size" not in given:
        given["world_size"] = num_gpus or 1
        if num_gpus is None:
            program.notes.append("the number of processes is not given: 1 is assumed; set --num_gpus N")
    if str(given.get("max_steps", "-1")).startswith("-"):
        given.pop("max_steps", None)
    if is_online:  # TRL counts optimizer steps
        for name in ("save_steps", "eval_steps"):
            if name in given:
                given[f"trl.{name}"] = given.pop(name)
    if str(given.get("use_peft", False)).lower() == "true":
        return ["peft"]
    for name in [name for name in given if name.startswith("lora_")]:
        program.notes.append(f"{name} {given.pop(name)} has no effect in TRL without use_peft")
    return []


def _applicable(defaults: Mapping[str, object], given: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    rivals = DEFAULTS["rivals"]
    for name, value in defaults.items():
        if name not in given and rivals.get(name) not in given:
            yield name, value
