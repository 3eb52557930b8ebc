"""Chat commands without a model: input lines, and the resulting state and output."""

from pathlib import Path

import pytest

from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.formats.tools import tools_of
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.chat.commands import COMMANDS, End, Load, Save, reply_to
from rlhf_cli.runs.chat.session import Ask, Session, Turn

TALK = Session(system="Be kind.", turns=(Turn("1+1", ("2", "3")), Turn("2+2", ("4", "5"))), attempt=1)


def roles(conversation):
    return [(message.role, message.content) for message in conversation.messages]


def test_a_line_without_a_slash_is_a_message_and_two_slashes_begin_one_with_a_slash():
    assert reply_to(TALK, "hello /help").action == Ask("hello /help")
    assert reply_to(TALK, "//usr/bin is a folder").action == Ask("/usr/bin is a folder")


def test_each_model_is_asked_with_its_own_answers():
    first, second = (TALK.conversation(number, Ask("3+3")) for number in (0, 1))
    start = [("system", "Be kind."), ("user", "1+1")]
    assert roles(first) == [*start, ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "3+3")]
    assert roles(second) == [*start, ("assistant", "3"), ("user", "2+2"), ("assistant", "5"), ("user", "3+3")]


def test_retry_asks_the_last_message_without_its_answers_and_replaces_the_turn():
    ask = reply_to(TALK, "/retry").action
    assert ask == Ask("2+2", attempt=2, again=True)
    assert roles(TALK.conversation(0, ask))[-1] == ("user", "2+2")
    assert len(TALK.conversation(0, ask).messages) == 4
    after = TALK.answered(ask, ["four", "five"])
    assert after.turns == (TALK.turns[0], Turn("2+2", ("four", "five")))
    assert after.attempt == 2
    assert after.answered(Ask("3+3"), ["6", "7"]).attempt == 0


def test_attempts_places_and_seeds_have_seeds_of_their_own_and_a_seed_set_again_gives_the_same_ones():
    def seed_after(*lines, session=TALK):
        for line in lines:
            reply = reply_to(session, line)
            session = reply.session
        return session.seed(reply.action)

    seeds = [seed_after("a"), seed_after("/retry"), seed_after("/set seed 7", "/retry"), seed_after("/set seed 7", "a")]
    assert len(set(seeds)) == 4
    assert seed_after("/set seed 7", "/retry") == seeds[2]
    once = Session(turns=(Turn("1+1", ("2",)),))
    first = Session().seed(Ask("1+1"))
    assert seed_after("/set seed 42", "/retry", session=once) == first  # sampled like the first answer


def test_retry_at_temperature_0_warns_that_nothing_will_change():
    greedy = Session(SamplingConfig(temperature=0), turns=TALK.turns)
    assert "same answer" in reply_to(greedy, "/retry").text
    assert reply_to(TALK, "/retry").text == ""


def test_undo_takes_back_one_turn_and_clear_all_of_them_but_not_the_system_prompt():
    undone = reply_to(TALK, "/undo")
    assert undone.session.turns == TALK.turns[:1]
    assert "'2+2'" in undone.text
    for line in ("/clear", "/reset"):
        cleared = reply_to(TALK, line)
        assert (cleared.session.turns, cleared.session.system) == ((), "Be kind.")
        assert "system prompt is kept" in cleared.text


def test_the_system_prompt_is_shown_set_and_dropped():
    assert reply_to(TALK, "/system").text == "system prompt: Be kind."
    assert reply_to(TALK, "/system Be brief.").session.system == "Be brief."
    assert reply_to(TALK, "/system off").session.system is None
    assert reply_to(Session(), "/system").text == "no system prompt"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set temperature=0.7", "temperature", 0.7),
        ("/set top_p 0.9", "top_p", 0.9),
        ("/set top_k -1", "top_k", 0),
        ("/set min_p 0.1", "min_p", 0.1),
        ("/set max_new_tokens 5", "max_new_tokens", 5),
        ("/set repetition_penalty 1.1", "repetition_penalty", 1.1),
        ("/set seed 3", "seed", 3),
        ("/set stop User:,Q", "stop", ["User:", "Q"]),
    ],
)
def test_sampling_settings_are_set_by_their_names(line, name, value):
    reply = reply_to(TALK, line)
    assert getattr(reply.session.sampling, name) == value
    assert reply.text.startswith(f"{name} ")
    assert reply.session.turns == TALK.turns


def test_set_alone_shows_all_settings_and_a_name_alone_its_value():
    assert "temperature 1.0" in reply_to(TALK, "/set").text
    assert "seed 42" in reply_to(TALK, "/set").text
    assert reply_to(TALK, "/set top_k").text == "top_k 0"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature 3", "temperature 3: must be a number from 0 to 2.0"),
        ("/set temperature warm", "temperature warm: must be a number"),
        ("/set temprature 1", "did you mean temperature"),
        ("/halp", "did you mean /help"),
        ("/save", "missing file name: /save FILE"),
        ("/save talk.txt", "must end with .json or .jsonl"),
        ("/load", "missing file name: /load FILE"),
    ],
)
def test_a_command_that_cannot_be_done_gets_one_sentence(line, words):
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        reply_to(TALK, line)


@pytest.mark.parametrize("line", ["/retry", "/undo", "/save x.json"])
def test_commands_about_a_turn_need_one(line):
    with pytest.raises(UsageError, match="there is no"):
        reply_to(Session(), line)


def test_a_setting_that_does_not_go_with_another_is_refused_and_changes_nothing():
    greedy = Session(SamplingConfig(temperature=0))
    with pytest.raises(UsageError, match="raise temperature"):
        reply_to(greedy, "/set top_p 0.5")


def test_files_and_rows_are_read_from_the_words():
    home = Path("~/talk.json").expanduser()
    assert reply_to(TALK, "/save ~/talk.json").action == Save(home)
    assert reply_to(TALK, "/load my talk.jsonl").action == Load(Path("my talk.jsonl"), 1)
    assert reply_to(TALK, "/load my talk.jsonl 12").action == Load(Path("my talk.jsonl"), 12)


def test_exit_ends_and_help_lists_every_command():
    assert reply_to(TALK, "/exit").action == End()
    listed = reply_to(TALK, "/help").text
    assert all(f"/{name}" in listed for name in COMMANDS)


def test_a_loaded_conversation_is_the_history_of_every_model():
    messages = (
        Message("system", "S"),
        Message("user", "a"),
        Message("assistant", "b", reasoning="hm"),
        Message("user", "c"),
        Message("assistant", "d"),
    )
    loaded = TALK.loaded(Conversation(messages), num_models=2)
    thought = "<think>\nhm\n</think>\n\nb"
    assert loaded.turns == (Turn("a", (thought, thought)), Turn("c", ("d", "d")))
    assert loaded.system == "S"
    assert TALK.loaded(Conversation(messages[1:]), num_models=1).system is None


def test_a_conversation_with_tools_cannot_be_gone_on_with():
    tools = tools_of({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tools"):
        TALK.loaded(Conversation((Message("user", "a"), Message("assistant", "b")), tools), num_models=1)
