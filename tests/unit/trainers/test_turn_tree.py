"""Turns of an episode as a tree: tokens, spans and branches, without copies of the tokens before a turn."""

import numpy as np
import pytest
from agent_fakes import asked

from rlhf_cli.data.rollouts import Branch, Episode, Generation
from rlhf_cli.data.templates.tool_calls import ParsedTurn
from rlhf_cli.trainers.online.turn_tree import TurnTree, entries, turn_seed

TURN = ParsedTurn("a", (), ())
MESSAGES = asked([{"role": "user", "content": "x"}]).messages
FACTS = Episode((), (2.0,), failure="failed")


@pytest.fixture
def tree() -> TurnTree:
    """Return two turns with an observation of one token between, another end of the first, and another prompt."""
    tree = TurnTree()
    message = tree.add(None, [1, 2, 3], Generation([4, 5], [-0.4, -0.5], "stop", 2), TURN, MESSAGES, first_call=0)
    tree.add(0, [6], Generation([7], [-0.7], "stop", 1), TURN, (*MESSAGES, message, *MESSAGES), first_call=0)
    tree.add(0, [], Generation([8], [-0.8], "length", 2), TURN, (*MESSAGES, message), first_call=0)
    tree.add(None, [9], Generation([8] * 2, [-0.9] * 2, "stop", 2), TURN, MESSAGES, first_call=0)
    return tree


def test_a_turn_stores_only_the_tokens_since_the_turn_before(tree):
    assert [turn.given_ids for turn in tree.turns] == [[1, 2, 3], [6], [], [9]]
    assert [tree.token_ids(number) for number in range(4)] == [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 8],
        [9, 8, 8],
    ]


def test_the_longest_response_is_known_without_copies_of_tokens(tree, monkeypatch):
    monkeypatch.delattr(TurnTree, "token_ids")
    assert tree.longest == 4
    tree.add(2, [0], Generation([0], [-1.0], "stop", 2), TURN, (), first_call=0)
    assert tree.longest == 5


def test_the_last_conversation_is_the_response_and_each_turn_is_trained_once(tree):
    found = tree.generation(FACTS, "length")
    assert found.episode is not None
    assert (found.token_ids, found.episode.turns, found.finish_reason) == ([8, 8], ((0, 2),), "length")
    assert (found.episode.turn_rewards, found.episode.failure) == ((2.0,), "failed")
    assert found.episode.earlier == (
        Branch([1, 2, 3], [4, 5, 6, 7], ((0, 2), (3, 4)), entries(tree.turns[1].messages)),
        Branch([1, 2, 3], [4, 5, 8], ((2, 3),), entries(tree.turns[2].messages)),
    )
    assert found.logprobs == [-0.4, -0.5, -0.7, -0.8, -0.9, -0.9]
    assert (found.weight_version, found.version_runs) == (1, ((2, 2), (1, 1), (2, 3)))


def test_shared_turns_are_trained_in_the_response(tree):
    tree.add(2, [0], Generation([0], [-1.0], "stop", 2), TURN, (), first_call=0)
    found = tree.generation(FACTS, "stop")
    assert found.episode is not None
    assert (found.token_ids, found.episode.turns) == ([4, 5, 8, 0, 0], ((0, 2), (2, 3), (4, 5)))
    assert [branch.turns for branch in found.episode.earlier] == [((3, 4),), ((0, 2),)]
    assert found.logprobs == [-0.7, -0.9, -0.9, -0.4, -0.5, -0.8, -1.0]


def test_a_conversation_has_the_experts_with_which_each_token_was_first_sampled():
    def sampled(count: int, experts: range) -> Generation:
        return Generation([0] * count, [-1.0] * count, "stop", 2, routed_experts=np.array(experts)[:, None, None])

    tree = TurnTree()
    tree.add(None, [1, 2, 3], sampled(2, range(4)), TURN, MESSAGES, first_call=0)
    tree.add(0, [6], sampled(2, range(10, 17)), TURN, MESSAGES, first_call=0)
    tree.add(0, [], sampled(1, range(20, 25)), TURN, MESSAGES, first_call=0)
    assert [len(turn.sampled.routed_experts) for turn in tree.turns] == [4, 3, 1]  # type: ignore[arg-type]
    found = tree.generation(FACTS, "stop")
    assert found.episode is not None
    ((earlier,), last) = found.episode.earlier, found.routed_experts
    assert (earlier.routed_experts.ravel().tolist(), last.ravel().tolist()) == (  # type: ignore[union-attr]
        [0, 1, 2, 3, 14, 15, 16],
        [0, 1, 2, 3, 24],
    )


def test_an_episode_without_a_turn_has_no_tokens():
    assert TurnTree().generation(FACTS, "stop") == Generation([], [], "stop", 0, FACTS)


def test_each_turn_has_a_seed_of_its_own():
    assert turn_seed(7, 0) == 7
    assert len({turn_seed(7, number) for number in range(99)}) == 99
