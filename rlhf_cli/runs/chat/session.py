"""The state of a conversation: messages, the answers of each model, system prompt and sampling settings.

Nothing here reads, writes or generates: commands.py changes the state, loop.py acts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf_cli.config.chat import ChatSamplingConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.rollouts import scattered_seed
from rlhf_cli.errors import UsageError
from rlhf_cli.models.vision.pictures import Picture

TURNS_OF_AN_ATTEMPT = 1 << 16


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture of a message, in its own size; a saved row names it by `source`, its path or a `data:` URL."""

    source: str
    picture: Picture


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and the answers to it, one for each model. The message has a `MARK` for each of its pictures."""

    message: str
    answers: tuple[str, ...]
    pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A message that waits for answers. `attempt` counts the answers to it before; `again` replaces the last turn."""

    message: str
    attempt: int = 0
    again: bool = False
    pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation with one or several models, each of which has its own answers in its history."""

    sampling: ChatSamplingConfig = field(default_factory=ChatSamplingConfig)
    system: str | None = None
    turns: tuple[Turn, ...] = ()
    attempt: int = 0
    """How often the last message was answered with this seed; -1 if the seed is new."""
    attached: tuple[ShownPicture, ...] = ()
    """Pictures of the next message."""

    def before(self, ask: Ask) -> "Session":
        """Return the session that the message is asked in: without the last turn, if the message is in that turn."""
        return replace(self, turns=self.turns[:-1]) if ask.again else self

    def conversation(self, model: int, ask: Ask) -> Conversation:
        """Return the messages up to the one that a model is asked, with that model's own answers."""
        before = self.before(ask)
        return Conversation((*before.messages(model), Message("user", ask.message, pictures=ask.pictures)))

    def messages(self, model: int) -> tuple[Message, ...]:
        """Return all messages, with the answers of one model."""
        messages = [] if self.system is None else [Message("system", self.system)]
        for turn in self.turns:
            user = Message("user", turn.message, pictures=turn.pictures)
            messages += [user, Message("assistant", turn.answers[model])]
        return tuple(messages)

    def answered(self, ask: Ask, answers: Sequence[str]) -> "Session":
        """Return the session with the answers of all models."""
        turn = Turn(ask.message, tuple(answers), ask.pictures)
        attached = self.attached if ask.again else ()
        return replace(self, turns=(*self.before(ask).turns, turn), attempt=ask.attempt, attached=attached)

    def seed(self, ask: Ask) -> int:
        """Return the seed of the answers: equal seeds, places in the conversation and attempts give equal ones."""
        place = len(self.before(ask).turns)
        return scattered_seed(self.sampling.seed, ask.attempt * TURNS_OF_AN_ATTEMPT + place)

    def loaded(self, conversation: Conversation, *, num_models: int) -> "Session":
        """Return the session with another conversation, which all models go on with.

        Raises:
            UsageError: a message is none of system, user and assistant, or calls a function; the system message has a
                picture.
        """
        first = conversation.messages[0]
        system = first if first.role == "system" else None
        rest = conversation.messages[1:] if system else conversation.messages
        others = [message for message in rest if message.role not in ("user", "assistant") or message.tool_calls]
        if others or conversation.tools:
            raise UsageError("the row has tools, and a chat has none")
        if system is not None and system.pictures:
            raise UsageError("the row has a picture in its system message, and a chat has none there")
        messages = [message.with_reasoning_in_text() for message in rest]
        turns = tuple(
            Turn(user.content, (answer.content,) * num_models, _shown(user.pictures))
            for user, answer in zip(messages[::2], messages[1::2], strict=True)
        )
        return replace(self, system=system.content if system else None, turns=turns, attempt=0, attached=())


def _shown(pictures: Sequence[object]) -> tuple[ShownPicture, ...]:
    return tuple(picture for picture in pictures if isinstance(picture, ShownPicture))
