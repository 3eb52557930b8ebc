"""Chat commands: an input line becomes a new state, a text to show, and an action.

This module does no I/O and no generation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.data.formats.conversations import MARK
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.chat.session import Ask, Session

_SAVED_KINDS = (".json", ".jsonl")
_SHOWN = 60
"""Maximum characters of a message quoted in a confirmation."""


@dataclass(frozen=True, slots=True)
class Save:
    """Save the conversation to a file."""

    path: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Load the conversation from a row, counted from 1."""

    path: Path
    row: int = 1


@dataclass(frozen=True, slots=True)
class Attach:
    """Attach an image to the next message."""

    path: Path


@dataclass(frozen=True, slots=True)
class End:
    """End the chat."""


_Action = Ask | Save | Load | Attach | End


@dataclass(frozen=True, slots=True)
class _Reply:
    """Result for an input line: new state, text to show, and action."""

    session: Session
    text: str = ""
    action: _Action | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A command: argument usage, description, and function."""

    words: str
    effect: str
    run: Callable[[Session, str], _Reply]


class _Settable(CommandConfig):
    """Settings that can be changed during a chat."""

    unsupported = ChatConfig.unsupported

    sampling: SamplingConfig


def reply_to(session: Session, line: str) -> _Reply:
    """Handle an input line: a command if it starts with a slash, else a message. `//` escapes a leading slash.

    Raises:
        UsageError: unknown command or invalid arguments.
    """
    if not line.startswith("/") or line.startswith("//"):
        return _Reply(session, action=_ask(session, line.removeprefix("/") if line.startswith("//") else line))
    name, _, words = line[1:].partition(" ")
    if name not in COMMANDS:
        # A typing error should not be sent to the model as a message.
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise UsageError(f"unknown command /{name}: {hint}/help lists commands; // starts a message with a slash")
    return COMMANDS[name].run(session, words.strip())


def _ask(session: Session, text: str) -> Ask:
    """Return the message, with attached images before the text."""
    # The template marks images with this character, so text that contains it would shift them.
    if session.attached and MARK in text:
        raise UsageError("the message contains U+FFFC, which is reserved for images")
    return Ask(MARK * len(session.attached) + text, pictures=session.attached)


def _help(session: Session, words: str) -> _Reply:
    usages = {f"/{name} {command.words}".rstrip(): command.effect for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    lines = [f"{usage.ljust(width)}  {effect}" for usage, effect in usages.items()]
    lines.append('Multi-line input: end a line with \\, or put the text between two lines of """.')
    return _Reply(session, "\n".join(lines))


def _save(session: Session, words: str) -> _Reply:
    path = _path(words, "/save FILE")
    if path.suffix not in _SAVED_KINDS:
        raise UsageError(f"/save {words}: the file name must end with {' or '.join(_SAVED_KINDS)}")
    if not session.turns:
        raise UsageError("there is nothing to save yet")
    return _Reply(session, action=Save(path))


def _load(session: Session, words: str) -> _Reply:
    # The row number is optional, and a file name may contain spaces, so split from the right.
    file, _, number = words.rpartition(" ")
    if file and number.isdigit() and int(number) > 0:
        return _Reply(session, action=Load(_path(file, "/load FILE"), int(number)))
    return _Reply(session, action=Load(_path(words, "/load FILE")))


def _path(words: str, usage: str) -> Path:
    if not words:
        raise UsageError(f"missing file name: {usage}")
    return Path(words).expanduser()


def _retry(session: Session, words: str) -> _Reply:
    if not session.turns:
        raise UsageError("there is no message to retry")
    greedy = session.sampling.temperature == 0
    note = "temperature 0 always gives the same answer; /set temperature 0.7 samples" if greedy else ""
    last = session.turns[-1]
    ask = Ask(last.message, attempt=session.attempt + 1, again=True, pictures=last.pictures)
    return _Reply(session, note, ask)


def _undo(session: Session, words: str) -> _Reply:
    if not session.turns:
        raise UsageError("there is no message to undo")
    # Restart the attempts: a message at this position is sampled like the first one.
    left = replace(session, turns=session.turns[:-1], attempt=0)
    return _Reply(left, f"removed {_quoted(session.turns[-1].message)} and the answer")


def _clear(session: Session, words: str) -> _Reply:
    kept = "; the system prompt is kept" if session.system is not None else ""
    return _Reply(replace(session, turns=(), attempt=0, attached=()), f"the conversation is empty{kept}")


def _system(session: Session, words: str) -> _Reply:
    if not words:
        return _Reply(session, "no system prompt" if session.system is None else f"system prompt: {session.system}")
    if words == "off":
        return _Reply(replace(session, system=None), "system prompt removed")
    return _Reply(replace(session, system=words), f"system prompt: {words}")


def _image(session: Session, words: str) -> _Reply:
    if words == "off":
        return _Reply(replace(session, attached=()), "no image in the next message")
    if words:
        return _Reply(session, action=Attach(Path(words).expanduser()))
    names = ", ".join(shown.source for shown in session.attached)
    return _Reply(session, f"images in the next message: {names}" if names else "no image in the next message")


def _set(session: Session, words: str) -> _Reply:
    settings = session.sampling.model_dump(include=set(_Settable.supported("sampling")))
    if not words:
        return _Reply(session, ", ".join(f"{name} {_shown(value)}" for name, value in settings.items()))
    name, _, value = words.replace("=", " ", 1).partition(" ")
    if name in settings and not value.strip():
        return _Reply(session, f"{name} {_shown(settings[name])}")
    # Validate through the config class, so that limits and messages are those of the command line.
    sampling = build_config(_Settable, {**settings, name: value.strip()}, spelled="{}").sampling
    attempt = -1 if name == "seed" else session.attempt  # restart the attempt count for the new seed
    return _Reply(replace(session, sampling=sampling, attempt=attempt), f"{name} {_shown(getattr(sampling, name))}")


def _shown(value: object) -> str:
    return (",".join(value) or "none") if isinstance(value, list) else str(value)


def _quoted(message: str) -> str:
    flat = " ".join(message.replace(MARK, "[image] ").split())
    return repr(flat if len(flat) <= _SHOWN else f"{flat[:_SHOWN]}...")


def _exit(session: Session, words: str) -> _Reply:
    return _Reply(session, action=End())


COMMANDS = {
    "help": Command("", "show this list", _help),
    "retry": Command("", "answer the last message again, with another seed", _retry),
    "undo": Command("", "remove the last message and its answer", _undo),
    "clear": Command("", "start a new conversation; keeps the system prompt", _clear),
    "reset": Command("", "same as /clear", _clear),
    "system": Command("[TEXT]", "show or set the system prompt; /system off removes it", _system),
    "image": Command("[FILE]", "attach an image to the next message, or list images; /image off removes them", _image),
    "set": Command("[NAME VALUE]", "show or change sampling settings: /set temperature 0.7", _set),
    "save": Command("FILE", "save the conversation for rlhf sft: FILE.jsonl or FILE.json", _save),
    "load": Command("FILE [ROW]", "continue a conversation from a file", _load),
    "exit": Command("", "end the chat, like Ctrl-D", _exit),
}
