"""Games of the real package textarena: rewards and moves worked out by hand, an opponent, missing games and data."""

import importlib.util
import random
from typing import Any

import pytest
from sent_actions import SentActions

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import Reply, Reset, Text
from rlhf_cli.agents.textarena import game_class, legal_moves
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import BadResult

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="pip install 'rlhf-cli[environments]'"
)
GUESS = "textarena:GuessTheNumber-v0?max_number=10&max_turns=4"


class SentEnvironments(SentActions, FileEnvironments): ...


def begun(name: str, seed: int) -> tuple[Any, str]:
    """Return a new game with its first observation."""
    game = game_class(name)()
    return game, game.reset(seed=seed)


def test_the_kind_and_the_identity_are_those_of_the_name() -> None:
    assert environment_kind(GUESS) == "textarena"
    found = EpisodeConfig(environment=GUESS).identity(max_len=100)
    assert found == {"environment": GUESS, "max_turns": 8, "max_len": 100}


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        pytest.raises(UsageError, match=r"textarena is not installed: pip install 'rlhf-cli\[environments\]'"),
        FileEnvironments(GUESS, timeout=60, num_workers=1),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("Available Moves: '[0]', '[4]'", ["[0]", "[4]"]),
        ("Valid moves: [e2e4], [e7e8q]", ["[e2e4]", "[e7e8q]"]),
        ("Available actions: '[roll]' or '[hold]'", ["[roll]", "[hold]"]),
        ("Your available actions are: '[check]', '[bet]'\nPot [3]", ["[check]", "[bet]"]),
        ("Available Moves: '[0]'\n[GAME] Available Moves: '[1]'", ["[1]"]),
        ("Take from a pile, as in [1 2].", []),
    ],
)
def test_the_last_list_of_moves_in_an_observation_is_read(text: str, moves: list[str]) -> None:
    assert legal_moves(text) == moves


@needs_package
def test_hints_lead_to_the_number_and_to_the_full_reward() -> None:
    """The game draws the number first, from the generator that it seeds."""
    game, rules = begun("GuessTheNumber-v0", seed=5)
    number = random.Random(5).randint(1, 20)
    assert number == 20
    assert rules.startswith("[GAME] You are Player 0.")
    assert "within 10 turns" in rules
    assert game.step("[12]") == ("[GAME] The target number is higher.", 0.0, False)
    # The package puts text without brackets in brackets.
    assert game.step("19") == ("[GAME] The target number is higher.", 0.0, False)
    assert game.step("I say [20].") == ("", 1, True)


@needs_package
def test_the_reward_of_a_lost_game_is_the_packages_share_of_the_distance() -> None:
    game, _ = begun("GuessTheNumber-v0?max_turns=2", seed=5)
    # The package counts a turn after it has checked the limit, so that there is one more.
    assert [game.step(f"[{guess}]")[1:] for guess in (1, 2)] == [(0.0, False), (0.0, False)]
    assert game.step("[8]")[1:] == (pytest.approx(1 - 12 / 19), True)


@needs_package
def test_an_invalid_move_may_be_repeated_once() -> None:
    game, _ = begun("GuessTheNumber-v0", seed=5)
    observation, reward, is_done = game.step("[99]")
    assert "guessed a number outside the range" in observation
    assert (reward, is_done) == (0.0, False)
    # Without a valid guess, nothing is complete.
    assert game.step("[99]")[1:] == (0.0, True)


@needs_package
@pytest.mark.parametrize("seat", [0, 1])
def test_the_opponent_draws_from_the_free_cells_with_the_seed_of_the_episode(seat: int) -> None:
    game, observation = begun(f"TicTacToe-v0?player={seat}", seed=3)
    assert f"You are Player {seat}" in observation
    opponent, free = random.Random(3), list(range(9))

    def opponent_moves() -> str:
        cell = opponent.choice(free)
        free.remove(cell)
        return f"Player {1 - seat} placed their symbol"

    if seat:
        assert opponent_moves() in observation
    for _ in range(2):
        observation, reward, is_done = game.step(f"[{free.pop(0)}]")
        # The opponent's move and its text, but not the model's text.
        assert opponent_moves() in observation
        assert f"[Player {seat}]" not in observation
        assert legal_moves(observation) == [f"[{cell}]" for cell in free]
        assert (reward, is_done) == (0.0, False)


@needs_package
def test_three_in_a_row_win_against_the_random_opponent() -> None:
    game, _ = begun("TicTacToe-v0", seed=0)
    # With seed 0, the opponent chooses the cells 7 and 5.
    rewards = [game.step(f"[{cell}]")[1:] for cell in (0, 1, 2)]
    assert rewards == [(0.0, False), (0.0, False), (1, True)]


@needs_package
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GuessTheNumbr-v0", r"is not a game of textarena \(did you mean GuessTheNumber-v0"),
        ("xyz", "is not a game of textarena: the games are 2048-v0, Alquerque-v0"),
        ("TicTacToe-v0?size=4", "is invalid: TicTacToe-v0 has no parameter 'size': player"),
        ("GuessTheNumber-v0?max_turns=x", "is invalid: max_turns must be an integer, not 'x'"),
        ("TicTacToe-v0?player=2", "is invalid: player must be 0 or 1, not 2"),
        ("GuessTheNumber-v0?player=1", "is invalid: GuessTheNumber-v0 has one player"),
        ("GuessTheNumber-v0?max_number=-5", "against one opponent: empty range"),
        ("Othello-v0?board_size=5", "board_size must be an even integer"),
        ("ThreePlayerTicTacToe-v0", "cannot be played alone or against one opponent: .* exactly three players"),
        ("ConnectFour-v0", "lists no legal moves for a random opponent: play it in an environment file"),
        ("Snake-v0", "cannot be played alone or against one opponent"),
        ("UsedCar-v0-balanced", "cannot be imported: No module named 'textarena.envs.UsedCar'"),
    ],
)
def test_games_that_cannot_be_played_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadResult, match=message):
        game_class(name)


@needs_package
def test_word_lists_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(place: str) -> None:
        raise LookupError(place)

    monkeypatch.setattr("nltk.data.find", missing)
    with pytest.raises(BadResult, match=r"requires NLTK data that are not installed: python -m nltk.downloader words"):
        game_class("Hangman-v0")


@needs_package
@pytest.mark.usefixtures("no_process_is_left")
def test_episodes_of_a_game_are_processes_with_the_seed_of_their_row() -> None:
    with SentEnvironments(GUESS, timeout=60, num_workers=2) as environments:
        assert environments.description.about == "GuessTheNumber-v0 of textarena: step reads the text of each turn"
        environments.check_columns(["question"])
        numbers = {episode: random.Random(seed).randint(1, 10) for episode, seed in enumerate((7, 8))}
        assert numbers == {0: 6, 1: 4}
        for episode, row in enumerate(({"seed": 7}, {})):
            environments.send(episode, Reset(row, seed=8))
            ((_, reply),) = environments.collect()
            assert reply.failure is None
            assert "between 1 and 10 within 4 turns" in reply.observations[0]
            environments.send(episode, Text(f"[{numbers[episode]}]"))
            assert environments.collect() == [(episode, Reply(("",), reward=1.0, is_done=True))]


@needs_package
def test_the_message_of_a_refused_game_names_the_setting() -> None:
    with (
        pytest.raises(
            UsageError, match=r"--environment textarena:Chess is not a game of textarena \(did you mean Chess"
        ),
        FileEnvironments("textarena:Chess", timeout=60, num_workers=1),
    ):
        pass
