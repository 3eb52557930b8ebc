"""Command lines of users of other frameworks become commands that parse, with the batches of the framework."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import foreign_commands
import pytest

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.foreign.migration import migrated
from rlhf_cli.foreign.programs import FRAMEWORKS, Program, programs_in
from rlhf_cli.options import typer_command

TEXT = (Path(foreign_commands.__file__).parent / "foreign_programs.txt").read_text()
BLOCKS = TEXT.strip().split("\n\n")[1:]


def block(text: str) -> tuple[list[str], str, list[str]]:
    """Return words, expected command and settings without an equivalent of a block."""
    lines = text.splitlines()[1:]
    place = next(number for number, line in enumerate(lines) if line.startswith("-> "))
    words = shlex.split(" ".join(lines[:place]))
    outcome, _, left = " ".join(lines[place:]).partition("; left out: ")
    is_module = words[0] not in ("accelerate", "rl")
    return ["python3", "-m", *words] if is_module else words, outcome.removeprefix("-> rlhf "), left.split()


PROGRAMS = [(text.partition("\n")[0].removeprefix("# "), *block(text)) for text in BLOCKS]


def program_of(words: list[str]) -> Program:
    (program,) = programs_in(words)
    return program


def verl(given: Mapping[str, str], command: str) -> tuple[int, int, int]:
    count = int(given.get("actor_rollout_ref.rollout.n", 1))
    mini_batch = int(given.get("actor_rollout_ref.actor.ppo_mini_batch_size", 256))
    return int(given.get("data.train_batch_size", 1024)), count, mini_batch * count


def easyr1(given: Mapping[str, str], command: str) -> tuple[int, int, int]:
    count = int(given.get("worker.rollout.n", 1))
    mini_batch = int(given.get("worker.actor.global_batch_size", 256))
    return int(given.get("data.rollout_batch_size", 512)), count, mini_batch * count


def openrlhf(given: Mapping[str, str], command: str) -> tuple[int, int, int]:
    sizes = (("rollout_batch_size", 1024), ("n_samples_per_prompt", 1), ("train_batch_size", 128))
    first, second, third = (int(given.get(name, default)) for name, default in sizes)
    return first, second, third


def trl(given: Mapping[str, str], command: str) -> tuple[int, int, int]:
    count = int(given.get("num_generations", 8 if command == "grpo" else 2))
    batch = int(given.get("per_device_train_batch_size", 8)) * int(given["world_size"])
    generated = batch * int(given.get("steps_per_generation", given.get("gradient_accumulation_steps", 1)))
    return generated // count, count, batch * int(given.get("gradient_accumulation_steps", 1))


def prime_rl(given: Mapping[str, str], command: str) -> tuple[int, int, int]:
    responses, count = int(given["orchestrator.batch_size"]), int(given.get("orchestrator.group_size", 1))
    return responses // count, count, responses


UNITS: dict[str, Callable[[Mapping[str, str], str], tuple[int, int, int]]] = {
    "verl": verl,
    "easyr1": easyr1,
    "openrlhf": openrlhf,
    "trl": trl,
    "prime-rl": prime_rl,
}
"""Prompts per iteration, responses per prompt and responses per optimizer step, worked out without the table."""


def test_there_are_enough_programs_of_each_framework():
    counts = Counter(program_of(words).framework for _, words, _, _ in PROGRAMS)
    assert counts.keys() == FRAMEWORKS.keys()
    assert min(counts.values()) >= 10
    assert counts.total() >= 100


@pytest.mark.parametrize(("source", "words", "command", "left"), PROGRAMS, ids=[row[0][-50:] for row in PROGRAMS])
def test_a_program_becomes_a_command_with_its_batches_and_names_what_is_left_out(source, words, command, left):
    program = program_of(words)
    found = migrated(program)
    assert program.command == command
    assert sorted({reason.partition(":")[0].split()[0] for reason in found.refused}) == left
    if command in ONLINE_TRAINING and not set(left) & {"rollout_batch_size", "per_device_train_batch_size"}:
        given = {name: str(value) for name, value in program.settings.items()}
        prompts, count, step = UNITS[program.framework](given, command)
        size = min(step, prompts * count)
        expected = f"batches: {prompts:,} prompts x {count} responses per iteration, {size:,} responses"
        assert any(note.startswith(expected) for note in found.remarks), found.remarks


@pytest.mark.parametrize("place", range(0, len(PROGRAMS), 8))
def test_the_printed_command_is_accepted_by_the_parser_of_a_plan(place):
    words = PROGRAMS[place][1]
    line = migrated(program_of(words)).command_line()
    seen: list[object] = []
    _, name, *flags = shlex.split(line.replace("\\\n", " "))
    typer_command(name, planned_class(name), seen.append).main(flags, standalone_mode=False)
    assert len(seen) == 1
