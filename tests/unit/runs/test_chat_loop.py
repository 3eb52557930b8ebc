"""The chat loop with an echo model, and conversation files."""

import io
import json
import signal

import pytest
from chat_fakes import EchoSpeaker, ScriptedScreen

from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.runs.chat.loop import AGAIN_ENDS, Chat
from rlhf_cli.runs.chat.screen import PipeScreen
from rlhf_cli.runs.chat.session import Session, Turn


def chat_of(*lines, speakers=None, is_interactive=True, session=None):
    screen = ScriptedScreen(*lines, is_interactive=is_interactive)
    chat = Chat(session or Session(), speakers or [EchoSpeaker()], screen)
    failed = chat.run()
    return chat, screen, failed


def test_messages_are_answered_in_their_order_and_the_history_grows():
    speaker = EchoSpeaker()
    chat, screen, failed = chat_of("one", "", "  ", "two", speakers=[speaker])
    assert chat.session.turns == (Turn("one", ("one",)), Turn("two", ("two",)))
    assert speaker.asked == [1, 3]
    assert [answer[:2] for answer in screen.answers] == [[None, "one"], [None, "two"]]
    assert failed == 0


def test_exit_ends_before_later_lines():
    chat, _, _ = chat_of("one", "/exit", "two")
    assert len(chat.session.turns) == 1


def test_several_models_answer_one_after_the_other_under_their_names():
    first, second = EchoSpeaker("a"), EchoSpeaker("b", pressed_after=1)
    chat, screen, _ = chat_of("one", "two", speakers=[first, second])
    assert [answer[0] for answer in screen.answers] == ["a", "b", "a", "b"]
    assert chat.session.turns[0].answers == ("one", "o")
    assert [m.content for m in chat.session.messages(1)] == ["one", "o", "two", "two"]


def test_ctrl_c_stops_an_answer_and_keeps_it_and_the_next_model_answers():
    chat, screen, _ = chat_of("hello", "on", speakers=[EchoSpeaker("a", pressed_after=3), EchoSpeaker("b")])
    assert chat.session.turns[0].answers == ("hel", "hello")
    assert screen.answers[0] == ["a", "hel", "stopped"]
    assert len(chat.session.turns) == 2


def test_ctrl_c_at_the_prompt_after_a_stopped_answer_ends_the_chat():
    chat, screen, _ = chat_of("hello", KeyboardInterrupt, "never", speakers=[EchoSpeaker(pressed_after=3)])
    assert len(chat.session.turns) == 1
    assert screen.lines == ["never"]


def test_ctrl_c_at_the_prompt_ends_the_chat_the_second_time_only():
    chat, screen, _ = chat_of(KeyboardInterrupt, "hello", KeyboardInterrupt, KeyboardInterrupt, "never")
    assert [turn.message for turn in chat.session.turns] == ["hello"]
    assert sum(AGAIN_ENDS in text for text in screen.told) == 2
    assert screen.lines == ["never"]


def test_ctrl_c_ends_a_script_at_once_and_the_handler_of_before_is_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        chat_of("hello", speakers=[EchoSpeaker(pressed_after=3)], is_interactive=False)
    chat_of("hello", speakers=[EchoSpeaker(pressed_after=3)])
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_is_cut_has_a_note():
    _, screen, _ = chat_of("/set max_new_tokens 2", "hello")
    assert screen.answers == [[None, "he", "truncated at max_new_tokens 2"]]


def test_an_empty_answer_takes_its_message_back_and_leaves_the_former_answer_of_a_retry():
    chat, screen, _ = chat_of("nothing", "hello")
    assert chat.session.turns == (Turn("hello", ("hello",)),)
    assert "empty answer: the message is removed" in screen.told
    start = Session(turns=(Turn("nothing", ("an answer",)),))
    chat, _, _ = chat_of("/retry", session=start)
    assert chat.session.turns == start.turns
    assert chat.session.attempt == 1


def test_a_message_without_room_is_reported_and_the_chat_goes_on():
    chat, screen, failed = chat_of("one", "two", "/undo", "three", speakers=[EchoSpeaker(room=2)])
    assert screen.faults == ["no room"]
    assert failed == 1
    assert [turn.message for turn in chat.session.turns] == ["three"]


def test_retry_draws_with_another_seed():
    speaker = EchoSpeaker()
    chat_of("one", "/retry", "/retry", "/set seed 42", "/retry", speakers=[speaker])
    first, second, third, again = speaker.seeds
    assert len({first, second, third}) == 3
    assert again == first


def test_a_saved_conversation_is_loaded_again_and_others_files_are_left_alone(tmp_path):
    file, theirs = tmp_path / "talk.jsonl", tmp_path / "theirs.json"
    theirs.write_text("[]")
    start = Session(SamplingConfig(), system="Be kind.")
    lines = ("ünïcode 🙂", f"/save {file}", "two", f"/save {file}", f"/save {theirs}", "/clear", f"/load {file}")
    chat, screen, _ = chat_of(*lines, session=start)
    assert [turn.message for turn in chat.session.turns] == ["ünïcode 🙂", "two"]
    assert len(file.read_text().splitlines()) == 1
    assert screen.faults == [f"{theirs} already exists and was not written by this chat: choose another name"]
    assert theirs.read_text() == "[]"


def test_several_models_save_a_row_each_and_a_row_is_loaded_by_its_number(tmp_path):
    file = tmp_path / "talk.json"
    speakers = [EchoSpeaker("a"), EchoSpeaker("b", pressed_after=2)]
    chat, screen, _ = chat_of("hello", f"/save {file}", f"/load {file} 2", f"/load {file} 3", speakers=speakers)
    rows = json.loads(file.read_text())
    assert [(row["pretrain"], row["messages"][-1]["content"]) for row in rows] == [("a", "hello"), ("b", "he")]
    assert chat.session.turns == (Turn("hello", ("he", "he")),)
    assert screen.faults == [f"{file} has 2 rows, not 3"]


def test_a_model_with_an_empty_answer_is_left_out_of_a_file(tmp_path):
    file = tmp_path / "talk.jsonl"
    speakers = [EchoSpeaker("a"), EchoSpeaker("b", pressed_after=0)]
    _, screen, _ = chat_of("hello", f"/save {file}", speakers=speakers)
    assert [json.loads(line)["pretrain"] for line in file.read_text().splitlines()] == ["a"]
    assert "1 skipped" in screen.told[-1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, "file not found"),
        ("text.jsonl", '{"text": "a"}\n', "plain text"),
        ("open.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', "no assistant turn"),
        ("dir/x.json", None, "file not found"),
    ],
)
def test_a_file_without_a_conversation_is_refused_and_the_chat_goes_on(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    chat, screen, _ = chat_of("hello", f"/load {tmp_path / name}")
    assert words in screen.faults[0]
    assert len(chat.session.turns) == 1


def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    _, screen, _ = chat_of("hello", f"/save {tmp_path}/none/talk.json")
    assert "cannot be written" in screen.faults[0]


def test_a_script_gets_the_answers_alone_and_everything_else_apart():
    out, errors = io.StringIO(), io.StringIO()
    screen = PipeScreen(io.StringIO("one\r\n/set top_k 5\n/nope\ntwo"), out, errors)
    assert Chat(Session(), [EchoSpeaker()], screen).run() == 1
    assert out.getvalue() == "one\ntwo\n"
    assert errors.getvalue().startswith("top_k 5\nrlhf chat: unknown command /nope")


def test_a_script_reads_the_models_names_before_their_answers():
    out = io.StringIO()
    screen = PipeScreen(io.StringIO("one\n"), out, io.StringIO())
    Chat(Session(), [EchoSpeaker("a"), EchoSpeaker("b")], screen).run()
    assert out.getvalue() == "[a] one\n[b] one\n"
