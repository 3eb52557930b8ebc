"""Chats with a tiny model: token ids, seeds, history, files, several models, scripts and Ctrl-C."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from chat_fakes import ScriptedScreen
from trained_folders import Trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.weight_files import folder_of
from rlhf_cli.options import build_config
from rlhf_cli.runs.chat.prompt_ids import PromptIds
from rlhf_cli.runs.chat.run import found_speakers, run_chat
from rlhf_cli.runs.chat.screen import PipeScreen
from rlhf_cli.runs.chat.session import Ask, Session, Turn
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.inference.model import find_inference_model


def chat_config(pretrain, **settings):
    return build_config(ChatConfig, {"pretrain": str(pretrain), "param_dtype": "fp32", "max_new_tokens": 12} | settings)


def talk(pretrain, *lines, **settings):
    """Chat with these lines and return the screen."""
    screen = ScriptedScreen(*lines)
    run_chat(chat_config(pretrain, **settings), open_screen=lambda: screen)
    return screen


def texts(screen):
    return [answer[1] for answer in screen.answers]


def greedy(folder, ids, max_new_tokens):
    """Return the token ids that `generate` of transformers adds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=max_new_tokens)
    return output[0, len(ids) :].tolist()


def test_greedy_answers_are_those_of_transformers_generate_over_two_turns(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    screen = talk(tiny_model_dir, "the one", "the other 🙂", temperature=0, system_prompt="Be kind.")
    start = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nthe one<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(start, add_special_tokens=False).input_ids
    answer = greedy(tiny_model_dir, ids, 12)
    assert texts(screen)[0] == tokenizer.decode(answer, skip_special_tokens=True)
    end = "" if answer[-1] == tokenizer.eos_token_id else "<|im_end|>"
    rest = f"{end}\n<|im_start|>user\nthe other 🙂<|im_end|>\n<|im_start|>assistant\n"
    second = ids + answer + tokenizer(rest, add_special_tokens=False).input_ids
    assert texts(screen)[1] == tokenizer.decode(greedy(tiny_model_dir, second, 12), skip_special_tokens=True)
    assert "fp32 on" in screen.told[0]
    assert "chat template" in screen.told[0]


def test_sampled_ids_stay_in_the_prompt_though_the_tokenizer_would_write_their_text_otherwise(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    t, h, th = (tokenizer.convert_tokens_to_ids(token) for token in ("t", "h", "th"))
    ids = PromptIds(tokenizer, plain=False)
    first = ids.of("a")
    ids.remember("a", first, [t, h, tokenizer.eos_token_id])
    assert ids.of("ath<|im_end|>th") == [*first, t, h, tokenizer.eos_token_id, th]
    assert ids.of("athth") == [*first, t, h, th]  # as after an interrupted answer
    assert ids.of("bth") == [*tokenizer("b").input_ids, th]


def test_the_same_messages_get_the_same_answers_and_retry_gets_others(tiny_model_dir):
    lines = ("the one", "/retry", "/set seed 7", "/retry", "/set seed 42", "/retry")
    first, again, other, back = texts(talk(tiny_model_dir, *lines))
    assert len({first, again, other}) == 3
    assert back == first
    assert texts(talk(tiny_model_dir, *lines)) == [first, again, other, back]
    assert texts(talk(tiny_model_dir, "the one", seed=7))[0] == other


def test_a_retry_forgets_the_answer_it_replaces(tiny_model_dir):
    plain = texts(talk(tiny_model_dir, "the one", "more", temperature=0))
    retried = texts(talk(tiny_model_dir, "the one", "/retry", "more", temperature=0))
    undone = texts(talk(tiny_model_dir, "else", "/undo", "the one", "more", temperature=0))
    assert plain == [retried[0], retried[2]] == undone[1:]


def test_a_stop_string_ends_an_answer_and_stays_a_part_of_it(tiny_model_dir):
    (whole,) = texts(talk(tiny_model_dir, "the one", temperature=0))
    middle = next(letter for letter in whole if letter.isalpha())
    (stopped,) = texts(talk(tiny_model_dir, f"/set stop {middle}", "the one", temperature=0))
    assert stopped == whole[: whole.index(middle) + 1]


def test_two_models_side_by_side_answer_as_each_alone(tiny_model_dir, tiny_llama_dir):
    lines = ("the one", "the other")
    alone = [texts(talk(folder, *lines)) for folder in (tiny_model_dir, tiny_llama_dir)]
    both = talk(f"{tiny_model_dir},{tiny_llama_dir}", *lines)
    assert [answer[0] for answer in both.answers] == [tiny_model_dir, tiny_llama_dir] * 2
    assert texts(both) == [alone[0][0], alone[1][0], alone[0][1], alone[1][1]]


@pytest.mark.usefixtures("group_of_one")
def test_an_adapter_and_a_checkpoint_answer_as_the_whole_model_and_leave_no_folder(
    tiny_model_dir, tmp_path, monkeypatch
):
    run = Trained(tmp_path, tiny_model_dir, lora_rank=4)
    whole = tmp_path / "whole"
    (speaker,) = found_speakers(chat_config(run.folder, max_new_tokens=12))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = speaker.prompt(Conversation((Message("user", "the one"),)), SamplingConfig(max_new_tokens=12)).ids
    with find_inference_model(ModelSource(pretrain=str(run.folder))).whole(whole, tell=print) as path:
        expected = tokenizer.decode(greedy(path, ids, 12), skip_special_tokens=True)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    screen = talk(f"{run.folder},{run.checkpoint}", "the one", temperature=0)
    assert texts(screen) == [expected, expected]
    assert expected != texts(talk(tiny_model_dir, "the one", temperature=0))[0]
    assert list(temporary.iterdir()) == []


def test_a_saved_conversation_is_a_row_that_sft_reads(tiny_model_dir, tmp_path):
    file = tmp_path / "talk.jsonl"
    screen = talk(tiny_model_dir, "the one", "/retry", "the other", f"/save {file}", system_prompt="Be kind.")
    assert screen.faults == []
    row = json.loads(file.read_text())
    assert [message["role"] for message in row["messages"]] == ["system", *("user", "assistant") * 2]
    assert [m["content"] for m in row["messages"][2::2]] == texts(screen)[1:]
    shown = {"for": "sft", "dataset": str(file), "pretrain": str(tiny_model_dir)}
    (preview,) = inspect_data(build_config(DataCommandConfig, shown))
    assert (preview.num_rows, preview.num_items, preview.happened) == (1, 1, [])


def test_a_message_without_room_says_so_and_the_chat_goes_on(tiny_model_dir):
    screen = talk(
        tiny_model_dir, "the one", "x" * 600, "/set max_new_tokens 600", "the two", "/set max_new_tokens 3", "y"
    )
    assert "has 512 positions" in screen.faults[0]
    assert "/undo or /clear" in screen.faults[0]
    assert "/set max_new_tokens " in screen.faults[1]
    assert len(screen.answers) == 2


def without_template(folder, tmp_path):
    """Return a copy of the model without a chat template."""
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    (base / "chat_template.jinja").unlink()
    return base


def test_settings_that_the_model_does_not_take_are_refused_before_its_weights_are_read(tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match=r"--max_new_tokens 512: .* has 512 positions, .* set 246, for example"):
        found_speakers(chat_config(tiny_model_dir, max_new_tokens=512))
    template = tmp_path / "strict.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(UsageError, match="no system"):
        found_speakers(chat_config(tiny_model_dir, tokenizer_chat_template=str(template), system_prompt="Be kind."))
    with pytest.raises(UsageError, match="a system prompt requires a chat template"):
        found_speakers(chat_config(without_template(tiny_model_dir, tmp_path), system_prompt="Be kind."))
    with pytest.raises(UsageError, match="--chat_template_kwargs requires a chat template"):
        found_speakers(chat_config(tmp_path / "base", chat_template_kwargs='{"a": 1}'))
    with pytest.raises(UsageError, match="lists a model twice"):
        chat_config(f"{tiny_model_dir},{tiny_model_dir}")


@pytest.mark.parametrize("is_turned_off", [True, False])
def test_a_model_without_a_template_continues_the_text(tiny_model_dir, tmp_path, is_turned_off):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = tiny_model_dir if is_turned_off else without_template(tiny_model_dir, tmp_path)
    given = {"apply_chat_template": False} if is_turned_off else {}
    screen = talk(model, "the ", " other", "/system S", "more", temperature=0, **given)
    ids = tokenizer("the ", add_special_tokens=False).input_ids
    first = greedy(tiny_model_dir, ids, 12)
    kept = first[:-1] if first[-1] == tokenizer.eos_token_id else first
    second = ids + kept + tokenizer(" other", add_special_tokens=False).input_ids
    expected = [first, greedy(tiny_model_dir, second, 12)]
    assert texts(screen) == [tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
    assert "no chat template (text completion)" in screen.told[0]
    assert screen.faults == ["a system prompt requires a chat template: set --tokenizer_chat_template FILE"]


def test_a_token_that_the_model_has_no_embedding_of_is_reported_and_the_chat_goes_on(tiny_model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    folder = tmp_path / "grown"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer.add_tokens([f"<new_{number}>" for number in range(60)])
    tokenizer.save_pretrained(folder)
    screen = talk(folder, "a <new_59>", "the one")
    assert "'<new_59>' has the id 31" in screen.faults[0]
    assert len(screen.answers) == 1


def test_an_input_template_is_around_every_message(tiny_model_dir):
    config = chat_config(tiny_model_dir, apply_chat_template=False, input_template=r"User: {}\nAssistant:")
    (speaker,) = found_speakers(config)
    session = Session(turns=(Turn("a", (" b\n",)),))
    assert speaker.prompt(session.conversation(0, Ask("c")), config.sampling).text == (
        "User: a\nAssistant: b\nUser: c\nAssistant:"
    )


def test_template_variables_reach_the_template_and_a_thought_that_it_opens_is_part_of_the_answer(
    tiny_model_dir, tmp_path
):
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}<think>\n{% endif %}{% endif %}"
    )
    file = tmp_path / "talk.json"
    settings = {"tokenizer_chat_template": str(template), "chat_template_kwargs": '{"thinks": true}'}
    screen = talk(tiny_model_dir, "the one", f"/save {file}", **settings)
    (row,) = json.loads(file.read_text())
    assert 'chat template with {"thinks": true}' in screen.told[0]
    assert row["messages"][1]["content"] == f"<think>\n{texts(screen)[0]}"


def test_a_template_may_end_turns_with_a_token_that_the_model_does_not_end_with(tiny_model_dir):
    speakers = found_speakers(chat_config(tiny_model_dir))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert speakers[0].text.end_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    plain = found_speakers(chat_config(tiny_model_dir, apply_chat_template=False))
    assert plain[0].text.end_ids == ()


def test_a_script_gets_an_answer_a_line_and_fails_if_a_line_fails(tiny_model_dir):
    expected = texts(talk(tiny_model_dir, "the one", "the other"))
    out, errors = io.StringIO(), io.StringIO()
    screen = PipeScreen(io.StringIO("the one\nthe other\n/nope\n"), out, errors)
    with pytest.raises(RunError, match="1 lines failed"):
        run_chat(chat_config(tiny_model_dir), open_screen=lambda: screen)
    assert out.getvalue() == "".join(f"{text}\n" for text in expected)
    assert "parameters, fp32 on" in errors.getvalue()


class PressingScreen(ScriptedScreen):
    """Presses Ctrl-C after some chunks of the first answer."""

    def write(self, piece):
        super().write(piece)
        if len(self.answers) == 1 and len(self.answers[0][1]) >= 3 and not getattr(self, "pressed", False):
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_within_an_answer_keeps_its_start_in_the_history(tiny_model_dir):
    (whole,) = texts(talk(tiny_model_dir, "the one", temperature=0))
    screen = PressingScreen("the one", "more")
    run_chat(chat_config(tiny_model_dir, temperature=0), open_screen=lambda: screen)
    start = texts(screen)[0]
    assert whole.startswith(start)
    assert len(start) < len(whole)
    assert screen.answers[0][2] == "stopped"
    assert len(texts(screen)) == 2


CONTROL_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]?)?")  # complete or only the beginning


class Terminal:
    """`rlhf chat` in a pseudo-terminal."""

    def __init__(self, *words):
        self.master, self.slave = pty.openpty()  # reading fails while no process has the other end open
        environment = {
            **os.environ,
            "TERM": "xterm",
            "NO_COLOR": "1",
            "HF_HUB_OFFLINE": "1",
            "TTY": os.ttyname(self.slave),
        }
        # The first terminal that a session leader opens sends SIGINT on Ctrl-C. A shell opens it, because Python code
        # in the child (preexec_fn) needs a fork, for which a large test process has not enough memory.
        shell = ["sh", "-c", 'exec "$@" <>"$TTY" >&0 2>&0', "sh"]
        command = [*shell, sys.executable, "-m", "rlhf_cli", "chat", *words]
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.seen = ""
        self.read = 0  # characters already waited for

    def until(self, words, seconds=180.0):
        """Wait for the words and return the text up to them since the last call."""
        end = time.monotonic() + seconds
        while (place := self.seen.find(words, self.read)) < 0:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 0.5)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        begin, self.read = self.read, place + len(words)
        return self.seen[begin : self.read]

    def more(self):
        """Wait for a new visible character.

        Control sequences are ignored: readline writes one after Enter, before the chat has read the line.
        """
        while not CONTROL_SEQUENCE.sub("", self.seen[self.read :]).strip():
            self.seen += os.read(self.master, 4096).decode(errors="replace")

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        os.close(self.master)
        os.close(self.slave)


def test_a_terminal_shows_the_model_streams_an_answer_stops_it_at_ctrl_c_and_ends_at_ctrl_d(tiny_model_dir, tmp_path):
    file = tmp_path / "talk.jsonl"
    terminal = Terminal(str(folder_of(tiny_model_dir)), "--param_dtype", "fp32", "--max_new_tokens", "450")
    start = terminal.until("> ")
    assert f"{tiny_model_dir}: 0.0M parameters, fp32 on" in start.replace("\r\n", "\n")
    terminal.type("the one\r")
    terminal.until("the one\r\n")
    terminal.more()
    terminal.type("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    terminal.type(f"/save {file}\r")
    terminal.until("saved 1 conversation")
    terminal.until("> ")  # only the line editor ends the chat on Ctrl-D
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    terminal.close()
    answer = json.loads(Path(file).read_text())["messages"][1]["content"]
    assert answer
