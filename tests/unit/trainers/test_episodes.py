"""Multi-turn episodes with fakes: tokens, masks, rewards and limits."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import pytest
from episode_fakes import SEPARATOR, TOOLS, FakeDialogue, FakeEnvironments, episode_engines
from samples import sample_of

from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text, late_reply, method_names
from rlhf_cli.data.formats.conversations import Conversation, Message, plain_message
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.turn_bridge import MALFORMED
from rlhf_cli.trainers.online.metrics import length_metrics
from rlhf_cli.trainers.online.rollout import generate, score_request

SAMPLING = SamplingParams(5)


class ScriptedEngines:
    """Answers each turn with the next text of its episode, selected by the first prompt token."""

    def __init__(self, scripts: dict[str, list[str]], *, long: Sequence[str] = ()) -> None:
        self.scripts, self.long = {name: list(texts) for name, texts in scripts.items()}, long
        self.batches: list[list[GenerationRequest]] = []
        self._left: list[tuple[int, Generation]] = []
        self.cuts: list[int] = []
        self.is_slow = False

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.batches.append(requests)
        for number, request in enumerate(requests):
            text = self.scripts[chr(request.prompt_ids[0])].pop(0)
            ids = [*map(ord, text)]
            reason = "length" if text in self.long else "stop"
            logprobs = [-float(len(self.batches))] * len(ids)
            self._left.append((number, Generation(ids, logprobs, reason, 3)))  # type: ignore[arg-type]

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        return [] if self.is_slow and timeout is not None else [self._left.pop()]

    def cut(self, max_tokens: int) -> None:
        self.cuts.append(max_tokens)
        self._left = [one for one in self._left if len(one[1].token_ids) <= max_tokens]

    def sleep(self) -> None: ...


def request(name: str, seed: int = 0) -> GenerationRequest:
    asked = plain_message(Message("user", f"{name}?"))
    row = json.dumps({"prompt": f"{name}?", "columns": {"name": name}, "messages": [asked]})
    return GenerationRequest([ord(name), ord("?")], seed, row=row, environment_seed=seed)


def play(
    environments: FakeEnvironments,
    engines: ScriptedEngines,
    requests: list[GenerationRequest],
    *,
    max_turns: int = 4,
    max_len: int = 100,
) -> list[Generation]:
    episodes = episode_engines(engines, environments, max_turns=max_turns, max_len=max_len)
    return asyncio.run(generate(episodes, requests, SAMPLING))


def test_an_episode_whose_environment_has_no_reward_says_so_to_the_rewards():
    environments = FakeEnvironments(lambda episode, turn, action: Reply(lacks_reward=isinstance(action, Finish)))
    environments.description = replace(environments.description, tools=TOOLS)
    (found,) = play(environments, ScriptedEngines({"a": ["."]}), [request("a")])
    assert found.episode is not None
    assert found.episode.lacks_reward
    assert Episode.of(json.loads(json.dumps(asdict(found.episode)))).lacks_reward
    prompt = Prompt([], "", None, "d", 0)
    asked = score_request(prompt, found, "", group="0", index=0, size=1)
    assert (asked.episode_reward, asked.lacks_reward) == (0.0, True)


def game(episode: int, turn: int, action: Action) -> Reply:
    """Answers with the turn number, which is also the reward, and is done after turn 2."""
    if turn == 0:
        return Reply()
    return Reply((str(turn),) if turn < 2 else (), float(turn), turn == 2)


def test_a_response_is_the_turns_with_observations_between_them_and_only_turns_are_trained():
    environments, engines = FakeEnvironments(game), ScriptedEngines({"a": ["hi", "bye"]})
    (found,) = play(environments, engines, [request("a", seed=7)])
    assert found.token_ids == [*b"hi", SEPARATOR, ord("1"), *b"bye"]
    assert found.logprobs == [-1.0] * 2 + [-2.0] * 3
    assert (found.finish_reason, found.weight_version, found.num_sampled) == ("stop", 3, 5)
    assert found.episode is not None
    assert (found.episode.turns, found.episode.turn_rewards) == (((0, 2), (4, 7)), (1.0, 2.0))
    sequence = sample_of(Prompt([97, 63], "a?", None, "d", 0), found).sequence
    assert sequence.token_ids.tolist() == [*b"a?hi", SEPARATOR, *b"1bye"]
    assert sequence.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 3
    assert environments.actions[0] == (0, Reset({"name": "a"}, 7))
    assert [action for _, action in environments.actions[1:]] == [Text("hi"), Text("bye")]
    assert not environments.open


def test_a_turn_begins_with_all_tokens_before_it_and_a_seed_of_its_own():
    engines = ScriptedEngines({"a": ["hi", "bye"]})
    play(FakeEnvironments(game), engines, [request("a", seed=7)], max_len=12)
    (first,), (second,) = engines.batches
    assert (first.prompt_ids, first.seed, first.max_new_tokens, first.row) == ([*b"a?"], 7, 10, None)
    assert first.episode == second.episode
    assert second.prompt_ids == [*b"a?hi", SEPARATOR, ord("1")]
    assert second.max_new_tokens == 6
    assert second.seed != 7


def test_turns_go_in_step_whatever_comes_first():
    scripts = {"a": ["hi", "bye"], "b": ["x", "yy"], "c": ["u", "v"]}
    batches, found = [], []
    for latest_first in (False, True):
        environments, engines = FakeEnvironments(game), ScriptedEngines(scripts)
        environments.latest_first = latest_first
        found.append(play(environments, engines, [request(name) for name in "abc"]))
        batches.append(engines.batches)
    assert found[0] == found[1]
    assert batches[0] == batches[1]
    assert [[chr(one.prompt_ids[0]) for one in batch] for batch in batches[0]] == [["a", "b", "c"]] * 2


def test_an_episode_with_tools_ends_with_a_turn_without_calls():
    def answer(episode: int, turn: int, action: Action) -> Reply:
        if isinstance(action, Calls):
            return Reply(tuple(f"seen {call.arguments['at']}" for call in action.calls), 0.25)
        return Reply((), 1.0 if isinstance(action, Finish) else 0.0)

    environments, engines = FakeEnvironments(answer, tools=True), ScriptedEngines({"a": ["cc", "cx", "x", "end"]})
    (found,) = play(environments, engines, [request("a")])
    assert found.episode is not None
    texts = bytes(found.token_ids).decode().replace(chr(SEPARATOR), "|")
    assert texts == "cc|seen 0|seen 1cx|seen 0|unreadablex|unreadableend"
    assert found.episode.turn_rewards == (0.25, 0.25, 0.0, 1.0)
    assert (found.episode.num_calls, found.episode.num_malformed) == (3, 2)
    assert [type(action) for _, action in environments.actions] == [Reset, Calls, Calls, Finish]


@pytest.mark.parametrize(
    ("given", "turns"),
    [({"max_turns": 1}, 1), ({"max_turns": 2}, 2), ({"max_len": 12}, 2), ({"max_len": 9}, 1)],
)
def test_an_episode_at_its_limit_is_truncated_and_keeps_its_reward(given, turns):
    def answer(episode: int, turn: int, action: Action) -> Reply:
        return Reply(() if turn == 0 or isinstance(action, Finish) else ("more",), 0.5)

    (found,) = play(FakeEnvironments(answer), ScriptedEngines({"a": ["go", "o", "n", "e"]}), [request("a")], **given)
    assert found.finish_reason == "length"
    assert found.episode is not None
    assert len(found.episode.turns) == turns
    assert found.episode.turns[-1][1] == len(found.token_ids)
    assert sum(found.episode.turn_rewards) == 0.5 * (turns + 2)  # for reset, each turn, and the final reward


def test_a_turn_that_was_cut_ends_the_episode():
    environments = FakeEnvironments(game)
    (found,) = play(environments, ScriptedEngines({"a": ["hellohello"]}, long=["hellohello"]), [request("a")])
    assert found.finish_reason == "length"
    assert [type(action) for _, action in environments.actions] == [Reset, Finish]


def test_an_environment_that_breaks_ends_its_own_episode_alone():
    def answer(episode: int, turn: int, action: Action) -> Reply:
        return Reply(failure="ran out of time (1 s)") if (episode, turn) == (1, 1) else game(episode, turn, action)

    engines = ScriptedEngines({"a": ["hi", "bye"], "b": ["hm"], "c": ["u", "v"]})
    found = play(FakeEnvironments(answer), engines, [request(name) for name in "abc"])
    assert [one.episode.failure if one.episode else "" for one in found] == [None, "ran out of time (1 s)", None]
    assert bytes(found[1].token_ids) == b"hm"


def late_in(turn_of_failure: int) -> Callable[[int, int, Action], Reply]:
    """Return replies with reward 0.5 each; the last one times out."""

    def answer(episode: int, turn: int, action: Action) -> Reply:
        if turn == turn_of_failure:
            return late_reply(1.0, method_names(action))
        return Reply(("seen",) * (turn > 0), 0.5)

    return answer


@pytest.mark.parametrize(
    ("tools", "scripts", "turn", "rewards"),
    [(True, ["c"], 1, (0.5,)), (True, ["c", "c"], 2, (1.0, 0.0)), (False, ["hi", "go"], 2, (1.0, 0.0))],
)
def test_an_answer_out_of_time_truncates_the_episode_with_the_reward_so_far(tools, scripts, turn, rewards):
    environments = FakeEnvironments(late_in(turn), tools=tools)
    (found,) = play(environments, ScriptedEngines({"a": scripts}), [request("a")])
    assert found.episode is not None
    assert (found.finish_reason, found.episode.failure, found.episode.turn_rewards) == ("length", None, rewards)
    assert found.episode.cut == f"ran out of time (1 s) in {'look' if tools else 'step'}"
    assert found.episode.turns[-1][1] == len(found.token_ids)
    assert length_metrics([found])["episode/truncated"] == 1.0
    assert not environments.open


@pytest.mark.parametrize(
    ("tools", "at_end", "script", "turn"),
    [(True, False, "c", 0), (False, False, "hi", 1), (True, True, "c", 1), (True, False, "end", 1)],
)
def test_an_episode_out_of_time_without_a_known_reward_fails(tools, at_end, script, turn):
    """Timeouts in reset, in the first step, in a tool of a class with `get_reward`, and in the final reward."""
    environments = FakeEnvironments(late_in(turn), tools=tools)
    environments.description = replace(environments.description, rewards_at_end=at_end)
    (found,) = play(environments, ScriptedEngines({"a": [script]}), [request("a")])
    assert found.episode is not None
    assert str(found.episode.failure).startswith("ran out of time (1 s) in ")
    assert length_metrics([found])["episode/truncated"] == 0.0


@pytest.mark.parametrize(("is_truncated", "reason"), [(True, "length"), (False, "stop")])
def test_an_end_at_a_limit_of_the_environment_is_truncated(is_truncated, reason):
    def answer(episode: int, turn: int, action: Action) -> Reply:
        return Reply(reward=turn, is_done=turn == 1, is_truncated=is_truncated and turn == 1)

    (found,) = play(FakeEnvironments(answer), ScriptedEngines({"a": ["hi"]}), [request("a")])
    assert found.episode is not None
    assert (found.finish_reason, found.episode.turn_rewards) == (reason, (1.0,))
    assert bool(found.episode.cut) == is_truncated


def test_the_words_of_reset_belong_to_the_prompt():
    def answer(episode: int, turn: int, action: Action) -> Reply:
        return Reply((" board",)) if turn == 0 else Reply(is_done=True)

    (found,) = play(FakeEnvironments(answer), ScriptedEngines({"a": ["hi"]}), [request("a")])
    assert found.episode is not None
    assert found.episode.prompt_ids == [*b"a? board"]
    assert found.episode.opening == " board"
    sequence = sample_of(Prompt([97, 63], "a?", None, "d", 0), found).sequence
    assert sequence.token_ids.tolist() == [*b"a? boardhi"]
    assert sequence.loss_mask.sum() == 2


def test_longer_episodes_are_given_up_when_no_other_is_left_and_leave_no_turn_behind():
    """`b` runs with `a` and `c`, which are already too long; its numbers must not depend on when that is noticed."""

    def answer(episode: int, turn: int, action: Action) -> Reply:
        is_last = (episode, turn) == (1, 2)
        return Reply(() if is_last or turn == 0 else ("1",), is_done=is_last)

    scripts = {"a": ["hello", "hm", "hm"], "b": ["hi", "b"], "c": ["hello", "u", "u"]}
    environments, engines = FakeEnvironments(answer), ScriptedEngines(scripts)
    episodes = episode_engines(engines, environments, max_turns=9, max_len=100)

    async def with_cut() -> list[tuple[int, Generation]]:
        episodes.begin([request(name) for name in "abc"], SAMPLING)
        episodes.cut(5)
        found = []
        while episodes.is_generating:
            found += await episodes.collect()
        return found

    found = asyncio.run(with_cut())
    assert [(number, bytes(one.token_ids[-1:])) for number, one in found] == [(1, b"b")]
    assert [len(batch) for batch in engines.batches] == [3, 3]
    assert not environments.open
    assert not engines.is_generating


def test_a_batch_begins_without_the_turns_of_the_one_before():
    environments, engines = FakeEnvironments(game), ScriptedEngines({"a": ["hi", "bye"], "b": ["ok", "go"]})
    episodes = episode_engines(engines, environments, max_turns=4, max_len=100)

    async def two_batches() -> list[Generation]:
        episodes.begin([request("a")], SAMPLING)
        engines.is_slow = True
        while not engines.batches:
            await episodes.collect(0.001)
        episodes.sleep()
        assert engines.cuts == [0]
        engines.is_slow = False
        return await generate(episodes, [request("b")], SAMPLING)

    (found,) = asyncio.run(two_batches())
    assert bytes(found.token_ids).startswith(b"ok")


def test_a_tool_that_the_model_made_up_is_not_named_to_the_template():
    environments = FakeEnvironments(
        lambda episode, turn, action: Reply(("no such tool",) if turn == 1 else ()), tools=True
    )
    (found,) = play(environments, ScriptedEngines({"a": ["n", "end"]}), [request("a")])
    assert found.episode is not None
    _, result, _ = found.episode.messages
    assert (result["name"], result["tool_call_id"]) == (MALFORMED, "call00000")


def test_what_the_template_does_not_take_fails_the_episode_alone():
    class Strict(FakeDialogue):
        def between(self, conversation: Conversation, observations: Sequence[Message], *, last_id: int) -> list[int]:
            if conversation.messages[0].content == "a?":
                raise TemplateFault("the chat template does not take this")
            return super().between(conversation, observations, last_id=last_id)

    engines = ScriptedEngines({"a": ["hi"], "b": ["ok", "go"]})
    episodes = episode_engines(engines, FakeEnvironments(game), dialogue=Strict(), max_turns=4, max_len=100)
    first, second = asyncio.run(generate(episodes, [request("a"), request("b")], SAMPLING))
    assert first.episode is not None
    assert first.episode.failure == "answered, and the chat template does not take this"
    assert second.episode is not None
    assert second.episode.failure is None
