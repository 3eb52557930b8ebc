"""The commands of a chat: a line that was typed becomes a new state, a text for the person, and something to do.

Nothing here reads, writes or generates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.chat import ChatSamplingConfig
from rlhf_cli.data.formats.conversations import MARK
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.chat.session import Ask, Session

SAVED_KINDS = (".json", ".jsonl")
SHOWN = 60
"""Characters of a message that a confirmation quotes."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write the conversation to a file."""

    path: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Go on with the conversation in a row of a file, counted from 1."""

    path: Path
    row: int = 1


@dataclass(frozen=True, slots=True)
class Attach:
    """Put a picture into the next message."""

    path: Path


@dataclass(frozen=True, slots=True)
class End:
    """End the chat."""


Action = Ask | Save | Load | Attach | End


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a line: the state after it, a text to show, and what is to be done."""

    session: Session
    text: str = ""
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the words behind its name, its effect in a phrase, and its function."""

    words: str
    effect: str
    run: Callable[[Session, str], Reply]


class _Settable(CommandConfig):
    """The settings that a chat may change."""

    sampling: ChatSamplingConfig


def reply_to(session: Session, line: str) -> Reply:
    """Return the outcome of a line: a command if it begins with a slash, else a message; `//` begins a message with a
    slash.

    Raises:
        UsageError: there is no such command, or its words are wrong.
    """
    if not line.startswith("/") or line.startswith("//"):
        return Reply(session, action=_ask(session, line.removeprefix("/") if line.startswith("//") else line))
    name, _, words = line[1:].partition(" ")
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise UsageError(f"there is no command /{name}: {hint}/help lists them, and // begins a message with a slash")
    return COMMANDS[name].run(session, words.strip())


def _ask(session: Session, text: str) -> Ask:
    """Return the message with the pictures that were attached before its text."""
    if session.attached and MARK in text:
        raise UsageError("the message has the character U+FFFC, which stands for a picture here")
    return Ask(MARK * len(session.attached) + text, pictures=session.attached)


def _help(session: Session, words: str) -> Reply:
    usages = {f"/{name} {command.words}".rstrip(): command.effect for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    lines = [f"{usage.ljust(width)}  {effect}" for usage, effect in usages.items()]
    lines.append('Several lines: end a line with \\, or put the text between two lines of """.')
    return Reply(session, "\n".join(lines))


def _save(session: Session, words: str) -> Reply:
    path = _path(words, "/save FILE")
    if path.suffix not in SAVED_KINDS:
        raise UsageError(f"/save {words}: give a file that ends with {' or '.join(SAVED_KINDS)}")
    if not session.turns:
        raise UsageError("there is nothing to save yet")
    return Reply(session, action=Save(path))


def _load(session: Session, words: str) -> Reply:
    file, _, number = words.rpartition(" ")
    if file and number.isdigit() and int(number) > 0:
        return Reply(session, action=Load(_path(file, "/load FILE"), int(number)))
    return Reply(session, action=Load(_path(words, "/load FILE")))


def _path(words: str, usage: str) -> Path:
    if not words:
        raise UsageError(f"a file is missing: {usage}")
    return Path(words).expanduser()


def _retry(session: Session, words: str) -> Reply:
    if not session.turns:
        raise UsageError("there is no message to answer again")
    greedy = session.sampling.temperature == 0
    note = "temperature 0 gives the same answer each time; /set temperature 0.7 samples" if greedy else ""
    last = session.turns[-1]
    ask = Ask(last.message, attempt=session.attempt + 1, again=True, pictures=last.pictures)
    return Reply(session, note, ask)


def _undo(session: Session, words: str) -> Reply:
    if not session.turns:
        raise UsageError("there is no message to take back")
    left = replace(session, turns=session.turns[:-1], attempt=0)
    return Reply(left, f"took back {_quoted(session.turns[-1].message)} and the answer")


def _clear(session: Session, words: str) -> Reply:
    kept = "; the system prompt stays" if session.system is not None else ""
    return Reply(replace(session, turns=(), attempt=0, attached=()), f"the conversation is empty{kept}")


def _system(session: Session, words: str) -> Reply:
    if not words:
        return Reply(session, "no system prompt" if session.system is None else f"system prompt: {session.system}")
    if words == "off":
        return Reply(replace(session, system=None), "no system prompt from here on")
    return Reply(replace(session, system=words), f"system prompt: {words}")


def _image(session: Session, words: str) -> Reply:
    if words == "off":
        return Reply(replace(session, attached=()), "no picture in the next message")
    if words:
        return Reply(session, action=Attach(Path(words).expanduser()))
    names = ", ".join(shown.source for shown in session.attached)
    return Reply(session, f"pictures of the next message: {names}" if names else "no picture in the next message")


def _set(session: Session, words: str) -> Reply:
    settings = session.sampling.model_dump()
    if not words:
        return Reply(session, ", ".join(f"{name} {_shown(value)}" for name, value in settings.items()))
    name, _, value = words.replace("=", " ", 1).partition(" ")
    if name in settings and not value.strip():
        return Reply(session, f"{name} {_shown(settings[name])}")
    sampling = build_config(_Settable, {**settings, name: value.strip()}, spelled="{}").sampling
    attempt = -1 if name == "seed" else session.attempt  # a new seed counts from its first answer
    return Reply(replace(session, sampling=sampling, attempt=attempt), f"{name} {_shown(getattr(sampling, name))}")


def _shown(value: object) -> str:
    return (",".join(value) or "none") if isinstance(value, list) else str(value)


def _quoted(message: str) -> str:
    flat = " ".join(message.replace(MARK, "[picture] ").split())
    return repr(flat if len(flat) <= SHOWN else f"{flat[:SHOWN]}...")


def _exit(session: Session, words: str) -> Reply:
    return Reply(session, action=End())


COMMANDS = {
    "help": Command("", "show this list", _help),
    "retry": Command("", "answer the last message again, with another seed", _retry),
    "undo": Command("", "take back the last message and its answer", _undo),
    "clear": Command("", "begin a new conversation; the system prompt stays", _clear),
    "reset": Command("", "the same", _clear),
    "system": Command("[TEXT]", "show or set the system prompt; /system off drops it", _system),
    "image": Command("[FILE]", "put a picture into the next message, or list them; /image off drops them", _image),
    "set": Command("[NAME VALUE]", "show or set how answers are sampled: /set temperature 0.7", _set),
    "save": Command("FILE", "write the conversation as a row that rlhf sft reads: FILE.jsonl or FILE.json", _save),
    "load": Command("FILE [ROW]", "go on with a conversation in a file of rows", _load),
    "exit": Command("", "end, as Ctrl-D does", _exit),
}
