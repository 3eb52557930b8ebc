"""run.lock: its contents, and the likely cause that two locks name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.backends.doctor.packages import installed_versions
from rlhf_cli.environment import processor_flags
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.run_lock import CAUSES, Facts, Start, facts_of, lock_differences, read_lock, write_lock
from rlhf_cli.version import __version__

IDENTITY: dict[str, object] = {
    "weights of the policy": "a" * 32,
    "configuration of the policy": "b" * 32,
    "tokenizer": "c" * 32,
    "chat template": "d" * 32,
    "contents of the prompts": "e" * 32,
    "number of prompts": 64,
    "seed": 42,
}


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(IDENTITY, {"reward_func": "f" * 32, "tracker": None})


def test_facts_are_grouped(facts: Facts):
    assert list(facts) == list(CAUSES)
    assert facts["data"] == {"contents of the prompts": "e" * 32, "number of prompts": 64}
    assert facts["models"] == {"weights of the policy": "a" * 32, "configuration of the policy": "b" * 32}
    assert facts["template"] == {"tokenizer": "c" * 32, "chat template": "d" * 32}
    assert facts["settings"] == {"seed": 42}
    assert facts["code"]["rlhf-cli"] == __version__
    assert facts["code"]["file of --reward_func"] == "f" * 32
    assert "file of --tracker" not in facts["code"]
    assert facts["packages"]["torch"] == installed_versions()["torch"]
    assert str(facts["machine"]["instructions"]).split() == sorted(processor_flags())
    assert facts["machine"]["ranks"] == 1


def test_instruction_sets_are_read_from_a_description():
    assert processor_flags("processor : 0\nflags\t: fpu avx2\nprocessor : 1\nflags\t: fpu avx2\n") == {"fpu", "avx2"}


def test_a_lock_keeps_the_starts_before_the_step_of_a_resumed_run(tmp_path: Path):
    for step in (0, 20, 40, 20):
        write_lock(tmp_path, {**IDENTITY, "seed": step}, {}, step=step)
    assert [(start.step, start.facts["settings"]["seed"]) for start in read_lock(tmp_path)] == [(0, 0), (20, 20)]
    write_lock(tmp_path, IDENTITY, {}, step=0)
    assert [start.step for start in read_lock(tmp_path)] == [0]


def test_a_missing_lock_has_no_starts_and_a_damaged_one_is_named(tmp_path: Path):
    assert read_lock(tmp_path) == []
    (tmp_path / "run.lock").write_text(json.dumps({"starts": [{"step": 0}]}))
    with pytest.raises(UsageError, match=r"run\.lock is damaged \(KeyError\)"):
        read_lock(tmp_path)


def changed(facts: Facts, group: str, **values: Any) -> Facts:
    """Return facts with other values; underscores stand for spaces."""
    other = copy.deepcopy(facts)
    other[group] |= {name.replace("_", " "): value for name, value in values.items()}
    return other


def test_equal_locks_have_no_difference(facts: Facts):
    assert lock_differences([Start(0, facts)], copy.deepcopy(facts)) == {}


@pytest.mark.parametrize(
    ("group", "values", "phrases"),
    [
        ("data", {"contents_of_the_prompts": "0" * 32}, ["contents of the prompts"]),
        ("models", {"weights_of_the_policy": None}, ["weights of the policy"]),
        ("packages", {"torch": "9.9"}, [f"torch {installed_versions()['torch']} -> 9.9"]),
        ("machine", {"ranks": 2}, ["ranks 1 -> 2"]),
        ("machine", {"processor": "x" * 50}, ["processor"]),
    ],
)
def test_a_difference_is_named_with_short_values(facts: Facts, group: str, values: dict, phrases: list[str]):
    assert lock_differences([Start(0, facts)], changed(facts, group, **values)) == {group: phrases}


def test_instruction_sets_that_are_missing_or_new_are_listed(facts: Facts):
    first, second = (changed(facts, "machine", instructions=flags) for flags in ("amx avx2 fma", "avx2 fma sse9"))
    assert lock_differences([Start(0, first)], second) == {"machine": ["instructions -amx +sse9"]}


def test_the_most_likely_cause_comes_first_and_all_starts_count(facts: Facts):
    resumed = changed(facts, "machine", threads=77)
    other = changed(changed(facts, "packages", torch="9.9"), "data", number_of_prompts=65)
    found = lock_differences([Start(0, facts), Start(20, resumed)], other)
    assert list(found) == ["data", "packages", "machine"]
    assert found["data"] == ["number of prompts 64 -> 65"]
    assert found["machine"] == [f"threads 77 -> {facts['machine']['threads']}"]
