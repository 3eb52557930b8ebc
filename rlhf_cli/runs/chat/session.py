"""State of a conversation: messages, answers per model, system prompt and sampling settings.

This module does no I/O and no generation: commands.py changes the state, loop.py acts on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.rollouts import scattered_seed
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import Picture

# Spacing between attempts in the seed counter. No conversation has this many turns, so seeds never repeat.
_TURNS_OF_AN_ATTEMPT = 1 << 16


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A message image at its original size. A saved row refers to it by `source`, a path or `data:` URL."""

    source: str
    picture: Picture


@dataclass(frozen=True, slots=True)
class Turn:
    """A message with one answer per model. The message contains a `MARK` per image."""

    message: str
    answers: tuple[str, ...]
    pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A message to answer. `attempt` counts earlier answers to it; `again` replaces the last turn."""

    message: str
    attempt: int = 0
    again: bool = False
    pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation with one or more models. Each model sees only its own answers in the history."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    system: str | None = None
    turns: tuple[Turn, ...] = ()
    attempt: int = 0
    """Number of answers to the last message with this seed; -1 for a new seed."""
    attached: tuple[ShownPicture, ...] = ()
    """Images for the next message."""

    def _before(self, ask: Ask) -> "Session":
        """Return the session before the message: without the last turn for a retry."""
        return replace(self, turns=self.turns[:-1]) if ask.again else self

    def conversation(self, model: int, ask: Ask) -> Conversation:
        """Return a model's conversation up to and including the message."""
        before = self._before(ask)
        return Conversation((*before.messages(model), Message("user", ask.message, pictures=ask.pictures)))

    def messages(self, model: int) -> tuple[Message, ...]:
        """Return all messages, with one model's answers."""
        messages = [] if self.system is None else [Message("system", self.system)]
        for turn in self.turns:
            user = Message("user", turn.message, pictures=turn.pictures)
            messages += [user, Message("assistant", turn.answers[model])]
        return tuple(messages)

    def answered(self, ask: Ask, answers: Sequence[str]) -> "Session":
        """Return the session with all models' answers added."""
        turn = Turn(ask.message, tuple(answers), ask.pictures)
        # Keep images attached after the original message for the next one.
        attached = self.attached if ask.again else ()
        return replace(self, turns=(*self._before(ask).turns, turn), attempt=ask.attempt, attached=attached)

    def seed(self, ask: Ask) -> int:
        """Return the answer seed, determined by the seed setting, position and attempt."""
        place = len(self._before(ask).turns)
        return scattered_seed(self.sampling.seed, ask.attempt * _TURNS_OF_AN_ATTEMPT + place)

    def loaded(self, conversation: Conversation, *, num_models: int) -> "Session":
        """Return the session with a loaded conversation, shared by all models.

        Raises:
            UsageError: a message has another role than system, user or assistant, or calls a tool; or the system
            message contains an image.
        """
        first = conversation.messages[0]
        system = first if first.role == "system" else None
        rest = conversation.messages[1:] if system else conversation.messages
        others = [message for message in rest if message.role not in ("user", "assistant") or message.tool_calls]
        if others or conversation.tools:
            raise UsageError("the row contains tools, which chat does not support")
        if system is not None and system.pictures:
            raise UsageError("the row has an image in its system message, which chat does not support")
        # A conversation of another tool may store reasoning in a separate field, but turns here are text.
        messages = [message.with_reasoning_in_text() for message in rest]
        turns = tuple(
            Turn(user.content, (answer.content,) * num_models, _shown(user.pictures))
            for user, answer in zip(messages[::2], messages[1::2], strict=True)
        )
        return replace(self, system=system.content if system else None, turns=turns, attempt=0, attached=())


def _shown(pictures: Sequence[object]) -> tuple[ShownPicture, ...]:
    return tuple(picture for picture in pictures if isinstance(picture, ShownPicture))
