"""Every `rlhf` command in the README, the docs and the example scripts parses; nothing is run.

Commands are found in the code blocks and code spans of Markdown and in the lines of shell scripts, also after
`deepspeed --module rlhf_cli`, `torchrun -m rlhf_cli`, `python -m rlhf_cli` and `ray job submit -- rlhf`.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from extending_page import page_file

from rlhf_cli import cli
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.code_settings import underscores
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.commands.plan import PLANNED, plan_settings, planned_class
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.plugins import load_target
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import Flag, config_class, flags_of
from rlhf_cli.options import typer_command
from rlhf_cli.planning.architectures import find_shape, published
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.planner import make_plan
from rlhf_cli.planning.shapes import ModelShape

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "examples/**/*.sh")
    for path in sorted(REPOSITORY.glob(pattern))
    if path.is_file()
]
SHELL_WORDS = {"then", "do", "else", "time", "exec", "nohup", "!", "{", "("}
LAUNCHERS = {"deepspeed", "torchrun", "python", "python3", "ray"}
END_OF_COMMAND = re.compile(r"[;&|]+|[<>].*|\d?>.*")  # shell operators, as words of their own
ROOT_FLAGS = {"--help", "--version", "--install-completion", "--show-completion"}


class Command(NamedTuple):
    """A documented command: its location and the arguments after `rlhf`."""

    where: str
    words: list[str]


def code_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each code block and code span of a Markdown document."""
    in_block, language = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if fence := re.match(r"\s*```(\S*)", line):
            in_block, language = not in_block, fence[1]
        elif in_block and language in ("", "sh", "bash", "shell", "console"):
            yield number, line
        elif not in_block:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))


def logical_lines(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join each line that ends in a backslash with the next one."""
    start, joined = 0, ""
    for number, line in lines:
        start, joined = start or number, joined + line.strip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            yield start, joined.strip()
            start, joined = 0, ""


def commands_in(name: str, text: str) -> list[Command]:
    """Return all commands of a document; the extension of `name` selects the parser."""
    lines = code_of(text) if name.endswith(".md") else iter(enumerate(text.splitlines(), 1))
    found = []
    for number, line in logical_lines(lines):
        if "rlhf" not in line or line.startswith("#"):
            continue
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe in prose
            continue
        found += [Command(f"{name}:{number}", expanded(after)) for after in split_at_operators(words) if after]
    return found


def expanded(words: list[str]) -> list[str]:
    """Expand shell parameters as if all were set: `${A:+--flag "$A"}` is kept, `${FLAGS:-}` is empty, and an array
    stands for settings that are not checked.
    """
    found = []
    for word in words:
        if re.fullmatch(r"\$\{\w+\[@\]\}", word):
            found.append("...")
        elif not re.fullmatch(r"\$\{\w+:-\}", word):
            optional = re.fullmatch(r"\$\{\w+:\+(.*)", word)
            found.append(optional[1] if optional else re.sub(r"^(\$\w+)\}$", r"\1", word))
    return found


def split_at_operators(words: list[str]) -> Iterator[list[str]]:
    """Yield the arguments after `rlhf` of each simple command in a line."""
    simple: list[str] = []
    for word in [*words, ";"]:
        if END_OF_COMMAND.fullmatch(word):
            yield after_program(simple)
            simple = []
        else:
            simple.append(word)


def after_program(words: list[str]) -> list[str]:
    """Return the arguments after the program's name, or nothing if the line does not call it."""
    rest = list(dropwhile(lambda word: word in SHELL_WORDS or re.match(r"\w+=", word), words))
    if not rest:
        return []
    program = rest[0].rsplit("/", 1)[-1]
    if program == "rlhf":
        return rest[1:]
    if program in LAUNCHERS:
        for number, word in enumerate(rest[1:], 1):
            if word == "rlhf_cli" and rest[number - 1] in ("-m", "--module"):
                return rest[number + 1 :]
            if word == "rlhf" and "--" in rest[:number]:
                return rest[number + 1 :]
    return []


def check(words: list[str]) -> None:
    """Raise UsageError unless the arguments after `rlhf` are a valid command line."""
    words = [word for word in words if not word.startswith("--local_rank")]
    if (
        not words or words[0].startswith("-") or words[0].isupper() or words[0] == "help"
    ):  # `rlhf --help`, `rlhf COMMAND --help`
        unknown = [word for word in words if word.startswith("-") and word not in ROOT_FLAGS]
        if unknown:
            raise UsageError(f"unknown flag {unknown[0]}")
        return
    name, *flags = words
    file = name.partition(":")[0]
    if name not in cli.COMMANDS and not file.endswith(".py"):
        raise UsageError(f"unknown command {name}")
    if "--help" in flags or not flags:
        return
    if name == "plan" and flags[0].isupper():  # `rlhf plan COMMAND`
        return
    if name == "plan" and flags[0] in PLANNED:
        parse(planned_class(flags[0]), flags[1:])
    elif name in cli.COMMANDS:
        parse(cli.COMMANDS[name].config_class, flags)
    else:
        with TemporaryDirectory() as folder:
            page_file(Path(folder), file)
            parse(config_class(load_target(f"{folder}/{name}")), flags)


def parse(
    cls: type[CommandConfig], words: list[str], run: Callable[[CommandConfig], None] = lambda config: None
) -> None:
    """Check flags against a config class, and call `run` with the settings.

    Missing settings are allowed in an excerpt (`...`) or with `--config`.
    """
    known = flags_of(cls)
    in_full = "..." not in words and "--config" not in words
    words = [word for word in words if word != "..."]
    if words and not words[0].startswith("-") and cls.positional:
        count = (
            len(list(takewhile(lambda word: not word.startswith("-"), words))) if known[cls.positional].is_list else 1
        )
        words = [f"--{cls.positional}", ",".join(words[:count]), *words[count:]]
    if "--config" in words:
        place = words.index("--config")
        files = [REPOSITORY / name for name in words[place + 1].split(",")]
        del words[place : place + 2]
        if all(file.exists() for file in files):
            words += ["--config", ",".join(map(str, files))]
    words = without_placeholders(words, known)
    if not in_full:
        words += least_of_the_rest(words, known)

    typer_command("check", cls, run).main(words, standalone_mode=False)


def without_placeholders(words: list[str], known: Mapping[str, Flag]) -> list[str]:
    """Replace `$SEED`, `<seed>` and `SEED` by the default if the flag takes no text; a variable inside a value counts
    as a number.
    """
    replaced = list(words)
    for number, word in enumerate(words):
        flag = known.get(underscores(word).removeprefix("__"))
        if flag is None or flag.required or flag.annotation is str:
            continue
        for place in range(number + 1, min(number + 1 + flag.takes, len(words))):
            if re.match(r"\$|<.*>|[A-Z]+$", words[place]):
                replaced[place] = "null" if flag.optional else sample(flag.default)
            else:
                replaced[place] = re.sub(r"\$\w+", "1", words[place])
    return replaced


def least_of_the_rest(words: list[str], known: Mapping[str, Flag]) -> list[str]:
    """Return the arguments that complete the command line."""
    flags = {underscores(word.split("=", 1)[0]).removeprefix("__") for word in words if word.startswith("--")}
    missing = [flag for flag in known.values() if flag.required and flag.name not in flags]
    added = [part for flag in missing for part in (f"--{flag.name}", str((flag.choices or ("x",))[0]))]
    if "reward_funcs" in known and not flags & {"reward_funcs", "reward_func", "tasks"}:
        added += ["--reward_funcs", "gsm8k"]
    return added


def sample(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, list) else str(default)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_documented_command_parses(path):
    wrong = []
    for command in commands_in(path.name, path.read_text()):
        try:
            check(command.words)
        except Exception as error:
            wrong.append(f"{command.where}: rlhf {shlex.join(command.words)}: {error}")
    assert not wrong, "\n".join(wrong)


def planned(config: CommandConfig) -> None:
    """Plan a command. Models that exist only in the text have the shape of a published one."""

    def shape(pretrain: str) -> ModelShape:
        return find_shape(pretrain if pretrain in published() else "Qwen/Qwen2.5-7B")

    settings = plan_settings(config)
    has_critic = isinstance(config, OnlineConfig) and ESTIMATORS[config.estimator].critic
    plan = make_plan(config, settings, hardware_of(settings), has_critic=has_critic, shapes=shape)
    assert plan.seconds > 0
    assert plan.peak > 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_documented_training_or_inference_command_has_a_plan(path):
    wrong = []
    for command in commands_in(path.name, path.read_text()):
        name, flags = command.words[0], command.words[1:]
        if name not in PLANNED or not flags or "--help" in flags:
            continue
        # The package of benchmark tasks decides how many requests it sends.
        if "--tasks" in flags or (name == "serve-rm" and "--reward_pretrain" not in flags):
            continue
        try:
            nodes = ["--num_nodes", "4"] if issubclass(cli.COMMANDS[name].config_class, OnlineConfig) else []
            parse(planned_class(name), [*flags, "--gpu", "h200", "--num_gpus", "8", *nodes], planned)
        except Exception as error:
            wrong.append(f"{command.where}: rlhf {shlex.join(command.words)}: {error!r}")
    assert not wrong, "\n".join(wrong)


FENCE = "```"
PAGE = f"""
Try `rlhf sft --help`, then the apostrophe's `make demo`.

{FENCE}bash
$ CUDA_VISIBLE_DEVICES=0 rlhf sft --pretrain m --dataset d \\
    --output o --learning-rate 1e-5 && echo done | tee log > out.txt
deepspeed --num_accelerators 2 --module rlhf_cli sft --pretrain m --dataset d --output $OUT --seed $SEED
torchrun --nproc_per_node 2 -m rlhf_cli sft --config run.yaml
ray job submit --working-dir . -- rlhf ppo --pretrain m ...
{FENCE}

{FENCE}python
rlhf = "not a command"
{FENCE}
"""


def test_commands_are_found_in_markdown_behind_launchers_and_over_lines():
    found = commands_in("page.md", PAGE)
    assert [command.where for command in found] == ["page.md:2", "page.md:5", "page.md:7", "page.md:8", "page.md:9"]
    assert found[1].words == shlex.split("sft --pretrain m --dataset d --output o --learning-rate 1e-5")
    assert found[2].words[:3] == ["sft", "--pretrain", "m"]
    assert found[4].words == ["ppo", "--pretrain", "m", "..."]
    for command in found:
        check(command.words)


def test_commands_are_found_in_scripts():
    script = '#!/bin/bash\n# rlhf nothing\nif true; then rlhf sft --pretrain "$MODEL" \\\n  --seed 1; fi\n'
    found = commands_in("run.sh", script)
    assert found == [Command("run.sh:3", ["sft", "--pretrain", "$MODEL", "--seed", "1"])]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("rlhf sft --pretrain m --dataset d --output o --learning_rat 1", "learning_rat"),
        ("rlhf sft --pretrain m --dataset d --output o --seed x", "--seed x"),
        ("rlhf sft --pretrain m --dataset d", "missing --output"),
        ("deepspeed --module rlhf_cli sft --config run.yaml --zero_stag 3", "zero_stag"),
        ("ray job submit -- rlhf pppo --pretrain m", "unknown command pppo"),
        ("FOO=1 python -m rlhf_cli --versoin", "--versoin"),
        ("rlhf sft --seed $SEED ... --epoch_count 2", "--epoch_count"),
    ],
)
def test_a_documented_command_that_is_wrong_is_named(line, complaint):
    (command,) = commands_in("run.sh", line)
    with pytest.raises(UsageError, match=complaint):
        check(command.words)


def test_commands_of_the_site_fit_into_80_columns():
    pages = [path for path in DOCUMENTS if path.suffix == ".md"]
    wide = [
        f"{path.relative_to(REPOSITORY)}: {line}"
        for path in pages
        for block in re.findall(r"^ *```bash\n(.*?)\n *```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if len(line) > 80 and " --" in line and "http" not in line
    ]
    assert wide == []
