"""Episodes of agent programs at their limits, and requests that must not harm the run."""

import pytest
from agent_fakes import asked
from test_agent_episodes import ADD, Play, user, words

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.chat_records import Refused
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.trainers.online.agent_episodes import MOST_REPEATED


def test_a_program_that_repeats_a_request_until_it_likes_the_answer_is_ended_and_fails_alone():
    def program(row):
        answers = [words((yield [asked([user("x")], first=False)]))]
        while answers[-1] != "an answer that it likes" and len(answers) <= row["number"] * 1000:
            answers.append(words((yield [asked([user("x")], first=False)])))
        return ProgramEnd(1.0)

    play = Play(program, num_episodes=2)
    calm, endless = (one.episode for one in play.found)
    assert calm is not None
    assert endless is not None
    assert (calm.failure, len(play.engines.sampled)) == (None, 2)
    assert str(endless.failure).startswith(f"(an agent program) repeated a request more than {MOST_REPEATED} times")
    assert endless.num_repeated == MOST_REPEATED + 1
    assert 1 in play.programs.dropped


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("too deep"), OverflowError("x"), UnicodeError("x")])
def test_a_request_that_cannot_be_rendered_is_refused_alone(monkeypatch, error):
    inner = ChatTemplate.prompt

    def prompt(template, conversation):
        if conversation.messages[-1].content == "bad":
            raise error
        return inner(template, conversation)

    monkeypatch.setattr(ChatTemplate, "prompt", prompt)

    def program(row):
        (answer,) = yield [asked([user("bad")], tools=[ADD])]
        assert isinstance(answer, Refused)
        assert str(answer).startswith(f"the messages cannot be rendered: {type(error).__name__}")
        yield [asked([user("good")], tools=[ADD])]
        return ProgramEnd(1.0)

    play = Play(program)
    assert play.response.episode is not None
    assert play.response.episode.turn_rewards == (1.0,)
