"""`rlhf data --environment` plays one episode interactively or from a script, with the tokens used in training."""

import asyncio
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsals import play, rehearsal_of, save_model_without_weights, texts
from rich.console import Console
from samples import sample_of

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.data.rollouts import Generation, SamplingParams
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.episode_preview import Rehearsal, WrittenEngines, read_turns
from rlhf_cli.runs.episode_view import LineReader, show_episode
from rlhf_cli.trainers.online.rollout import generate, request_of

pytestmark = pytest.mark.usefixtures("no_process_is_left")

PAGE = Path(__file__).parents[3] / "docs/howto/environments.md"
CALCULATOR, HIGHER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SUM = '<tool_call>{"name": "calculate", "arguments": {"program": "print(6 * 7)"}}</tool_call>'
ANSWER = '<tool_call>\n{"name": "submit", "arguments": {"result": "42"}}\n</tool_call>'
BROKEN = """
class Environment:
    def reset(self, **row):
        self.bag = {}

    def step(self, text):
        return self.bag[text], 0.0, False
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model_without_weights(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    tasks = [{"question": "What is 6 times 7?", "answer": "42"}, {"question": "What is 1 plus 1?", "answer": "2"}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    (folder / "number.jsonl").write_text(json.dumps({"prompt": "Guess.", "number": 5}) + "\n")
    for name, text in {"calculator": CALCULATOR, "higher": HIGHER, "broken": BROKEN}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def files(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def calculator(folder, model) -> Rehearsal:
    """Return an episode with tools, whose descriptions take a second to render."""
    return rehearsal_of(model, str(folder / "calculator.py"), str(folder / "tasks.jsonl"))


def page(rehearsal: Rehearsal, read_line: LineReader | None = None) -> str:
    stream = io.StringIO()
    show_episode(rehearsal, Console(file=stream), special_tokens=["<|im_end|>"], read_line=read_line)
    return stream.getvalue()


def test_turns_of_calls_earn_the_reward_of_the_calculator(calculator):
    played = play(calculator, SUM, ANSWER)
    (prompt, text), *rest = texts(played)
    assert prompt == "prompt"
    assert "Run a Python program." in text
    assert text.endswith("<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n<|im_start|>assistant\n")
    between = "\n<|im_start|>user\n<tool_response>\n42\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert rest == [
        ("turn 1, reward 0", SUM + "<|im_end|>"),
        ("answer", between),
        ("turn 2, reward 1", ANSWER + "<|im_end|>"),
    ]
    facts = played.example.facts
    assert (facts["reward"], facts["turns"], facts["end"]) == (
        "1",
        "2; at most 8 (max_turns)",
        "the environment is done",
    )
    assert facts["calls"] == "2 valid, 0 malformed"


# A class for TRL's `environment_factory`: no base class, `**kwargs`, Returns in docstrings, errors as answers.
SAFE = '''
class SafeEnv:
    def __init__(self):
        self.opened = 0

    def reset(self, **kwargs) -> str | None:
        self.digits, self.tries, self.reward, self.done = kwargs["answer"], 0, 0.0, False
        return f"\\nThe code has {len(self.digits)} digits."

    def try_code(self, code: int, loudly: bool = False) -> str:
        """
        Try to open the safe.

        Args:
            code: The digits to dial.
            loudly: Whether to knock.

        Returns:
            What the safe does.
        """
        if self.done:
            raise ValueError("The safe is open.")
        self.tries += 1
        if str(code) != self.digits:
            return "It stays shut."
        self.reward, self.done = 1.0 / self.tries, True
        return "It opens."
'''


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_class_of_trl_plays_unchanged_in_a_process_of_its_own(files, model):
    (files / "safe.py").write_text(SAFE)
    played = play(
        rehearsal_of(model, "safe.py"),
        call_of("try_code", code=41),
        call_of("try_code", code="a", loudly=True, hard=1),
        call_of("try_code", code=42) + "\n" + call_of("try_code", code=42),
    )
    (_, prompt), *parts = texts(played)
    assert "The digits to dial." in prompt
    assert "What is 6 times 7?\nThe code has 2 digits.<|im_end|>" in prompt
    assert [name for name, _ in parts] == [
        "turn 1, reward 0",
        "answer",
        "turn 2, reward 0",
        "answer",
        "turn 3, reward 0.5",
    ]
    assert "<tool_response>\nIt stays shut.\n</tool_response>" in parts[1][1]
    assert "Error: try_code: got an unexpected keyword argument 'hard'. Arguments: code, loudly" in parts[3][1]
    facts = played.example.facts
    assert (facts["reward"], facts["end"]) == ("0.5", "the environment is done")
    assert facts["calls"] == "4 valid, 0 malformed"


def test_without_a_script_each_tool_is_called_and_trained_text_is_marked(calculator):
    text = page(calculator)
    assert text.startswith("Episode with Environment of calculator.py: tools calculate, submit\n")
    marked = re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)[1:]
    assert ['"calculate"' in marked[0], '"submit"' in marked[1]] == [True, True]
    assert all(turn.endswith("<|im_end|>") for turn in marked)
    assert "  reward: 0\n" in text  # 1 is not the answer
    prompt, _, _ = text.partition("  turn 1, reward 0: ")
    assert "Run a Python program." in " ".join(prompt.split())


def test_a_person_sees_the_prompt_once_and_types_turns_of_several_lines(calculator):
    lines, seen = iter(['"""', *ANSWER.replace("42", "41").splitlines(), '"""']), []
    stream = io.StringIO()

    def read_line(prompt: str) -> str:
        seen.append(stream.getvalue())
        return next(lines)

    show_episode(calculator, Console(file=stream), special_tokens=[], read_line=read_line)
    assert "What is 6 times 7?" in seen[0]
    assert "Sample call:" in seen[0]
    whole = stream.getvalue()
    assert whole.count("  prompt: ") == 1
    assert "  turn 1, reward 0: " in whole.removeprefix(seen[-1])
    assert "  end: the environment is done\n" in whole


def test_ctrl_d_ends_a_typed_episode_which_keeps_its_turns(files, model):
    asked: Iterator[str] = iter(["", "7", "3"])
    screens: list[str] = []
    stream = io.StringIO()

    def read_line(prompt: str) -> str:
        screens.append(stream.getvalue())
        typed = next(asked, None)
        if typed is None:
            raise EOFError
        return typed

    rehearsal = rehearsal_of(model, "higher.py", "number.jsonl")
    show_episode(rehearsal, Console(file=stream), special_tokens=[], read_line=read_line)
    assert "<|im_start|>user\n    lower<|im_end|>" in screens[2].removeprefix(screens[1])
    assert "<|im_start|>user\n    higher<|im_end|>" in screens[3].removeprefix(screens[2])
    whole = stream.getvalue()
    assert "  turns: 2; at most 8 (max_turns)\n" in whole
    assert "  end: no more turns\n" in whole


def test_the_shown_tokens_are_those_that_training_has(files, model):
    Path("turns.txt").write_text("7\n3\n5\n")
    rehearsal = rehearsal_of(model, "higher.py", "number.jsonl", turns="turns.txt")
    turns = iter(("7", "3", "5"))
    with rehearsal.plan.played_by(WrittenEngines(lambda ids, start: next(turns), rehearsal.plan.dialogue)) as engines:
        (found,) = asyncio.run(generate(engines, [request_of(rehearsal.prompt, 0)], SamplingParams(256)))
    sequence = sample_of(rehearsal.prompt, found).sequence
    played = rehearsal.play_script()
    parts = played.example.parts
    assert sum(part.num_tokens for part in parts) == len(sequence.token_ids)
    assert sum(part.num_trained for part in parts) == sequence.loss_mask.sum()
    assert "".join(text for _, text in texts(played)) == rehearsal.decode(sequence.token_ids.tolist())
    trained = [token for token, is_trained in zip(sequence.token_ids, sequence.loss_mask, strict=True) if is_trained]
    assert rehearsal.decode(trained) == "7<|im_end|>3<|im_end|>5<|im_end|>"
    assert played.example.facts["reward"] == "1"


def test_a_turn_without_calls_ends_an_episode_with_tools(calculator):
    assert play(calculator, "It is 42.").example.facts["end"] == "a turn without calls"


@pytest.mark.parametrize(
    ("turns", "settings", "end"),
    [
        (["7", "6"], {"max_turns": 2}, "truncated at max_turns"),
        (["word " * 50], {"max_new_tokens": 20}, "truncated at max_new_tokens"),
        (["7"], {}, "no more turns"),
        ([], {}, "no more turns"),
    ],
)
def test_an_episode_ends_at_its_limits_as_in_training(files, model, turns, settings, end):
    played = play(rehearsal_of(model, "higher.py", "number.jsonl", **settings), *turns)
    assert played.example.facts["end"] == end
    assert sum(name.startswith("turn") for name, _ in texts(played)) == len(turns)


def test_an_answer_without_room_is_left_out_at_max_len(files, model):
    rehearsal = rehearsal_of(model, "higher.py", "number.jsonl")
    room = len(rehearsal.prompt.prompt_ids) + 4
    played = play(rehearsal_of(model, "higher.py", "number.jsonl", max_len=room, max_new_tokens=2), "7", "3")
    assert played.example.facts["end"] == "truncated at max_len"
    assert sum(part.num_tokens for part in played.example.parts) == room - 2  # a digit and the end of turn


def test_a_failing_environment_shows_its_traceback_and_fails_the_command(files, model):
    stream = io.StringIO()
    with pytest.raises(
        RunError, match=r"^the environment raised KeyError: 'The answer is 1\.' \(broken\.py, line 7\)$"
    ):
        show_episode(rehearsal_of(model, "broken.py"), Console(file=stream), special_tokens=[], read_line=None)
    text = stream.getvalue()
    assert "  end: the environment failed\n" in text
    sentence = "reward: none, because the environment raised KeyError: 'The answer is 1.' (broken.py, line 7)"
    assert sentence in " ".join(text.split())
    assert "Traceback (most recent call last):" in text
    assert "return self.bag[text], 0.0, False" in text


SILENT = '''
class Environment:
    def reset(self, **row): ...

    def look(self) -> str:
        """Look around."""
        return "nothing"
'''


def test_an_environment_without_a_reward_is_shown_without_one(files, model):
    (files / "silent.py").write_text(SILENT)
    text = " ".join(page(rehearsal_of(model, "silent.py")).split())
    assert "reward: none, because the environment has no reward: set self.reward in reset or in a tool" in text
    assert "turn 1: " in text


SERVER = '''
from mcp.server import MCPServer

server = MCPServer("rooms")

@server.tool()
def look() -> str:
    """Look around."""
    return "nothing"

server.run()
'''


def test_a_server_of_mcp_is_shown_without_a_reward(files, model):
    pytest.importorskip("mcp")
    (files / "rooms.py").write_text(SERVER)
    text = " ".join(page(rehearsal_of(model, f"mcp:{sys.executable} rooms.py", environment_timeout=60)).split())
    assert " turn 1: " in text
    assert "reward: none, because this kind of server returns no rewards: set --reward_funcs" in text


def test_a_turn_ends_at_the_first_end_in_it_and_is_cut_at_its_limit(calculator):
    dialogue = calculator.plan.dialogue
    (end,) = dialogue.end_ids
    ids = dialogue.written("one<|im_end|>two")
    assert ids == [*dialogue.written("one")]
    assert ids.index(end) == len(ids) - 1
    request = request_of(calculator.prompt, 0)
    engines = WrittenEngines(lambda token_ids, start: "one", dialogue)
    (whole,) = asyncio.run(generate(engines, [request], SamplingParams(len(ids))))
    (cut,) = asyncio.run(generate(engines, [request], SamplingParams(len(ids) - 1)))
    assert whole == Generation(ids, [0.0] * len(ids), "stop", 0)
    assert cut == Generation(ids[:-1], [0.0] * (len(ids) - 1), "length", 0)


def test_turns_of_a_file_are_its_lines_or_a_list_of_texts(files):
    Path("turns.txt").write_text("first\n\n[TOOL_CALLS] []\n")
    assert read_turns("turns.txt") == ("first", "[TOOL_CALLS] []")
    Path("turns.json").write_text('["a\\nb", ""]')
    assert read_turns("turns.json") == ("a\nb", "")
    reasons = {"{}": "must be a list of strings", "[]": "contains no turns", "[": "cannot be read: Expecting"}
    for text, reason in reasons.items():
        Path("turns.json").write_text(text)
        with pytest.raises(UsageError, match=f"--turns turns.json {reason}"):
            read_turns("turns.json")
    with pytest.raises(UsageError, match=r"--turns none\.txt cannot be read: .*No such file"):
        read_turns("none.txt")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"for": "sft", "environment": "calculator.py"}, "environment: an episode starts with a prompt"),
        ({"for": "gkd", "environment": "calculator.py"}, "environment: an episode starts with a prompt"),
        ({"for": "ppo", "environment": "none.py"}, "--environment none.py: there is no such file"),
        ({"for": "ppo", "environment": "higher.py"}, "needs the column 'number' in reset"),
        (
            {"for": "ppo", "environment": "calculator.py", "prompt_template": "r1_zero"},
            "--prompt_template: an environment requires the model's chat template",
        ),
    ],
)
def test_settings_that_cannot_be_played_are_refused(files, model, settings, reason):
    with pytest.raises(UsageError, match=reason):
        inspect_data(build_config(DataCommandConfig, {"dataset": "tasks.jsonl", "pretrain": model, **settings}))
