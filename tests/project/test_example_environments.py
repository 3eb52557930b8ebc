"""Tests of the example environments, played as in training: a search, a program that is run, a game."""

import importlib.util
import json
import os
import random
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from rehearsals import play, rehearsal_of, save_model_without_weights, texts

from rlhf_cli.runs.episode_preview import Rehearsal

FOLDER = Path(__file__).parents[2] / "examples" / "environments"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model_without_weights(tmp_path_factory.mktemp("model"))


def rehearsal(model: str, environment: str, rows: Path) -> Rehearsal:
    return rehearsal_of(model, str(FOLDER / environment), str(rows))


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def write(path: Path, row: dict) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


def loaded(name: str) -> ModuleType:
    """Import the module of an environment."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.usefixtures("no_process_is_left")
def test_a_search_answers_with_titles_and_excerpts_and_an_answer_ends_the_episode(model):
    played = play(
        rehearsal(model, "search.py", FOLDER / "questions.jsonl"),
        call("search", query="Who built the lighthouse?"),
        call("search", query="zebra"),
        "Ida Holm",
    )
    names, shown = zip(*texts(played), strict=True)
    assert names[1:] == ("turn 1", "answer", "turn 2", "answer", "turn 3")  # a verifier gives the reward
    assert "<tool_response>\nThe lighthouse of Varn: The lighthouse of Varn stands" in shown[2]
    assert "no text has any of these words" in shown[4]
    assert played.example.facts["end"] == "a turn without calls"


def test_every_question_is_answered_by_the_first_text_that_is_found():
    index = loaded("search").INDEX
    for row in rows_of("questions.jsonl"):
        question = row["prompt"].partition("alone. ")[2]
        first = index.search(question)[0]
        assert row["answer"] in " ".join(first.body.split()), question


def test_a_rare_word_counts_more_and_a_long_text_less(tmp_path):
    texts_of = {
        "a": "One\nsalt salt sea",
        "b": "Two\nsea lune",
        "c": "Three\nsea " + "wave " * 40 + "lune",
        "d": "Four\nsea",
    }
    for name, text in texts_of.items():
        (tmp_path / f"{name}.txt").write_text(text)
    index = loaded("search").Index(tmp_path)
    assert [found.title for found in index.search("sea lune")][:2] == ["Two", "Three"]
    assert [found.title for found in index.search("SALT")] == ["One"]
    assert index.search("heaven") == []
    with pytest.raises(FileNotFoundError, match="set TEXTS to a folder that has some"):
        loaded("search").Index(tmp_path / "none")


def test_an_excerpt_is_the_part_of_a_long_text_with_the_words_of_the_query(tmp_path):
    (tmp_path / "long.txt").write_text("Long\n" + "wave " * 100 + "the copper pan weighs 640 " + "wave " * 100)
    module = loaded("search")
    (found,) = module.Index(tmp_path).search("copper pan")
    excerpt = found.excerpt({"copper", "pan"})
    assert "copper pan" in excerpt
    assert len(excerpt.split()) == module.EXCERPT_WORDS


@pytest.mark.usefixtures("no_process_is_left")
def test_a_program_is_tried_on_the_examples_of_its_task(model):
    wrong, right = "def square(x):\n    return x + x", "def square(x):\n    return x * x"
    played = play(
        rehearsal(model, "coder.py", FOLDER / "tasks.jsonl"),
        call("try_examples", program=wrong),
        call("try_examples", program=right),
        f"```python\n{right}\n```",
    )
    _, _, (_, failed), _, (_, passed), _ = texts(played)
    assert "AssertionError" in failed
    assert "The examples pass." not in failed
    assert "<tool_response>\nThe examples pass." in passed
    assert played.example.facts["end"] == "a turn without calls"


def test_examples_of_the_tasks_are_assertions_on_the_function_that_is_asked_for():
    for row in rows_of("tasks.jsonl"):
        name = row["prompt"].removeprefix("Write a Python function ").partition("(")[0]
        assertions = [*row["examples"].splitlines(), *json.loads(row["label"])]
        assert len(assertions) >= 3
        assert all(f"{name}(" in one and one.startswith("assert ") for one in assertions)


@pytest.mark.usefixtures("no_process_is_left")
def test_a_game_goes_on_until_the_heap_is_empty_or_a_move_is_none(model, tmp_path):
    prompt = "Take stones."
    few = rehearsal(model, "nim.py", write(tmp_path / "few.jsonl", {"prompt": prompt, "stones": 3}))
    won = play(few, "I take 3")
    assert texts(won)[0][1].endswith("Take stones. There are 3 stones.<|im_end|>\n<|im_start|>assistant\n")
    assert (won.example.facts["reward"], won.example.facts["end"]) == ("1", "the environment is done")
    wrong = play(few, "I take 4")
    assert (wrong.example.facts["reward"], wrong.example.facts["turns"]) == ("0", "1; at most 8 (max_turns)")
    more = rehearsal(model, "nim.py", write(tmp_path / "more.jsonl", {"prompt": prompt, "stones": 9}))
    first, second = (texts(play(more, "1", "none")) for _ in range(2))
    assert first == second  # the seed determines the opponent's moves
    assert "stones.<|im_end|>" in first[2][1]


@pytest.mark.parametrize("stones", [5, 6, 7, 9, 10, 11])
def test_who_leaves_a_multiple_of_four_always_wins(stones):
    for seed in range(20):
        game = loaded("nim").Environment()
        game.reset(stones, seed)
        done, reward = False, 0.0
        while not done:
            _, reward, done = game.step(str(game.stones % 4))
        assert reward == 1.0


def test_random_moves_win_some_games_and_lose_others():
    rewards = []
    for seed in range(60):
        game, rng = loaded("nim").Environment(), random.Random(seed)
        game.reset(12, seed + 1000)
        done, reward = False, 0.0
        while not done:
            _, reward, done = game.step(str(rng.randint(1, min(3, game.stones))))
        rewards.append(reward)
    assert 0.2 < sum(rewards) / 60 < 0.8


@pytest.mark.parametrize("agent", ["search", "code", "nim"])
def test_the_script_plays_an_episode_then_trains_and_evaluates_with_files_that_exist(tmp_path, agent):
    """`rlhf` is replaced by a stub that records its arguments."""
    (tmp_path / "rlhf").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$CALLS"\n')
    (tmp_path / "rlhf").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    script = FOLDER.parent / "scripts" / "agent_grpo.sh"
    subprocess.run(["bash", str(script), agent, "MODEL", str(tmp_path / "run")], check=True, env=environment)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [words.split()[0] for words in calls] == ["data", "grpo", "eval"]
    for words in calls:
        file, rows = (re.search(pattern, words) for pattern in (r"--environment (\S+)", r"(\S+\.jsonl)"))
        assert file is not None
        assert rows is not None
        assert Path(file[1]).is_file()
        assert Path(rows[1]).is_file()
    assert all("--reward_funcs " in words for words in calls[1:])


def test_an_unknown_agent_is_refused():
    script = FOLDER.parent / "scripts" / "agent_grpo.sh"
    done = subprocess.run(["bash", str(script), "chess", "MODEL"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no agent chess" in done.stderr
