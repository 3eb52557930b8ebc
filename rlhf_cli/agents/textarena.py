"""Games of the package textarena (0.7.4) as environment classes: `textarena:GAME?PARAMETER=VALUE&...`.

Imported only in environment processes. The package's wrappers repeat the full history in each observation; here, each
observation contains only the new messages, because a dialogue keeps the earlier ones.
"""

import importlib
import inspect
import random
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_cli.config.queries import parameters_of
from rlhf_cli.errors import UsageError, did_you_mean, one_line
from rlhf_cli.rewards.records import BadResult

_SEAT = "player"
"""Parameter with the model's seat in a game for two."""
_LISTING = re.compile(
    r"\b(?:available|legal|valid) (?:actions|moves)\b[^\n\[]*((?:[^\n\[]*\[[^\[\]\n]+\])+)", re.IGNORECASE
)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
# Folders in which NLTK looks for the data that the package's games use.
_DATA_FOLDERS = ("corpora", "taggers")


@dataclass(frozen=True)
class _Choice:
    """A game with its parameters, the number of players, and the model's seat."""

    name: str
    parameters: Mapping[str, object]
    num_players: int
    seat: int

    def new(self) -> Any:
        """Create a game, which is not reset yet."""
        import textarena

        with _no_prints():
            return textarena.make(self.name, **self.parameters)


class _Game:
    """A game whose turns are the model's. In a game for two, the opponent plays random legal moves."""

    choice: ClassVar[_Choice]

    def reset(self, seed: int) -> str:
        """Begin a game. Returns its rules and first position, as the model's player sees them."""
        self._game = self.choice.new()
        with _no_prints():
            self._game.reset(num_players=self.choice.num_players, seed=seed)
        self._state = _rules(self._game).state
        # Separate from the global generator, from which the game draws.
        self._opponent = random.Random(seed)
        self._is_done = False
        self._let_opponent_move()
        return _lines(self._state, self._new_messages())

    def step(self, text: str) -> tuple[str, float, bool]:
        """Make a move, and let the opponent reply."""
        from textarena import ObservationType

        self._is_done = self._move(text)
        # The model's text is already in the dialogue.
        own = ObservationType.PLAYER_ACTION
        shown = [message for message in self._new_messages() if own not in message]
        self._let_opponent_move()
        shown += self._new_messages()
        return _lines(self._state, shown), self._reward() if self._is_done else 0.0, self._is_done

    def _new_messages(self) -> list[Any]:
        """Return the model's messages since the last call."""
        seat = self.choice.seat
        messages, self._state.observations[seat] = self._state.observations[seat], []
        return messages

    def _let_opponent_move(self) -> None:
        while not self._is_done and self._state.current_player_id != self.choice.seat:
            moves = legal_moves(self._game.get_observation()[1])
            if not moves:
                raise BadResult(f"has game {self.choice.name}, which listed no legal moves for the opponent")
            self._is_done = self._move(self._opponent.choice(moves))

    def _move(self, text: str) -> bool:
        """Make a move of the current player. Returns whether the game has ended."""
        with _no_prints():
            is_done, _ = self._game.step(action=text)
        return bool(is_done)

    def _reward(self) -> Any:
        rewards, facts = self._game.close()
        if rewards is None:
            raise BadResult(f"has game {self.choice.name}, which ended without a reward")
        loser = 1 - self.choice.seat
        # The game's list of moves was wrong, which must not count as a win.
        if self.choice.num_players == 2 and facts[loser].get("invalid_move"):
            raise BadResult(f"has game {self.choice.name}, which rejected a move that it listed for the opponent")
        return rewards[self.choice.seat]


def game_class(text: str) -> type:
    """Return the environment class of `GAME?PARAMETER=VALUE&...`, which is the game's name for messages.

    Parameters are those of the game's class. `player=1` lets the opponent of a game for two begin.

    Raises:
        BadResult: there is no such game or parameter, the game does not accept a value, has more than two players or
            lists no moves for the opponent, or data that it needs are missing. Completes "textarena:GAME ...".
    """
    _replace_downloads()
    name, _, query = text.partition("?")
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise BadResult(f"requires textarena 0.7.4 ({error}): pip install 'rlhf-cli[environments]'") from error

    if name not in ENV_REGISTRY:
        near = did_you_mean(name, ENV_REGISTRY) or f": the games are {', '.join(_without_variants(ENV_REGISTRY))}"
        raise BadResult(f"is not a game of textarena{near}")
    try:
        parameters = parameters_of(name, query, _defaults(ENV_REGISTRY[name]))
    except UsageError as error:
        raise BadResult(f"is invalid: {error}") from error
    seat = parameters.pop(_SEAT, 0)
    if seat not in (0, 1):
        raise BadResult(f"is invalid: {_SEAT} must be 0 or 1, not {seat}")
    choice = _Choice(name, parameters, _num_players(name, parameters), int(seat))
    if choice.num_players == 1 and seat:
        raise BadResult(f"is invalid: {name} has one player, number 0")
    found = type(name, (_Game,), {"choice": choice})
    _try(found)
    return found


def _try(found: type[_Game]) -> None:
    """Begin a game. Raises BadResult if an episode could not be played."""
    observation = found().reset(seed=0)
    # The opponent sees such a list too.
    if found.choice.num_players == 2 and not legal_moves(observation):
        raise BadResult("lists no legal moves for a random opponent: play it in an environment file, with your own one")


def _defaults(spec: Any) -> dict[str, object]:
    """Return the parameters of a game's class with their defaults, and the seat."""
    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, kind = entry.partition(":")
        try:
            entry = getattr(importlib.import_module(module), kind)
        except SyntaxError as error:
            raise BadResult("requires Python 3.12, like a few games of textarena") from error
        except ImportError as error:
            raise BadResult(f"cannot be imported: {one_line(error)}") from error
    empty = inspect.Parameter.empty
    parameters = {one.name: None if one.default is empty else one.default for one in _parameters(entry)}
    return {**parameters, **spec.kwargs, _SEAT: 0}


def _parameters(cls: type) -> Iterable[inspect.Parameter]:
    return inspect.signature(cls).parameters.values()


def _num_players(name: str, parameters: Mapping[str, object]) -> int:
    """Return the number of players, 1 or 2. Raises BadResult if the game needs more, or cannot begin."""
    from textarena import SinglePlayerState, TwoPlayerState

    reasons: list[str] = []
    for number, kind in ((1, SinglePlayerState), (2, TwoPlayerState)):
        try:
            game = _Choice(name, parameters, number, 0).new()
            with _no_prints():
                game.reset(num_players=number, seed=0)
        except BadResult:
            raise
        # Games check their number of players and their parameters, and raise anything.
        except Exception as error:
            reasons.append(one_line(error))
        else:
            if isinstance(_rules(game).state, kind):
                return number
    # A wrong value is refused with each number of players; the number itself may be refused with the other one.
    reason = next((reason for reason in reasons if "player" not in reason), (reasons or ["it needs more players"])[-1])
    raise BadResult(f"cannot be played alone or against one opponent: {reason}")


def _no_prints() -> AbstractContextManager[object]:
    """Drop what games print, a few lines per move."""
    return redirect_stdout(None)


def _rules(game: Any) -> Any:
    """Return the game inside its wrappers."""
    from textarena.core import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


def _lines(state: Any, messages: Iterable[Any]) -> str:
    """Format messages with their senders, like the package's `LLMObservationWrapper`."""
    return "\n".join(f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages)


def legal_moves(observation: object) -> list[str]:
    """Return the moves of the last list in an observation, such as `Available Moves: '[0]', '[4]'`; [] without one."""
    listings = _LISTING.findall(observation) if isinstance(observation, str) else []
    return _MOVE.findall(listings[-1]) if listings else []


def _without_variants(names: Collection[str]) -> list[str]:
    """Return the names that have no other one as their beginning."""
    return sorted(name for name in names if not any(name != one and name.startswith(one) for one in names))


def _replace_downloads() -> None:
    """Make games report missing NLTK data, which they would download when they are imported."""
    import nltk

    def require(names: str | list[str], *_: object, **__: object) -> bool:
        for name in [names] if isinstance(names, str) else names:
            if not any(_has_data(f"{folder}/{name}") for folder in _DATA_FOLDERS):
                raise BadResult(f"requires NLTK data that are not installed: python -m nltk.downloader {name}")
        return True

    nltk.download = require


def _has_data(place: str) -> bool:
    import nltk

    try:
        nltk.data.find(place)
    except LookupError:
        return False
    return True
