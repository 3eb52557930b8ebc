"""Chat loop: reads lines, runs commands, and lets each model answer in turn."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rlhf_cli.errors import UsageError
from rlhf_cli.runs.chat.commands import Attach, End, Load, Save, reply_to
from rlhf_cli.runs.chat.files import read_conversation, rows_of, shown_picture, write_conversation
from rlhf_cli.runs.chat.screen import Screen
from rlhf_cli.runs.chat.session import Ask, Session
from rlhf_cli.runs.chat.speaker import ChatAnswer, ChatPrompt, Speaker

AGAIN_ENDS = "Press Ctrl-C again to end the chat, or use Ctrl-D or /exit"


class _CtrlC:
    """Tracks Ctrl-C. While a line is read, Ctrl-C raises KeyboardInterrupt instead."""

    def __init__(self) -> None:
        self._was_pressed = False
        self._is_raised = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGINT within the block. Outside, Ctrl-C ends the program as usual."""
        previous = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C within the block."""
        self._is_raised = True
        try:
            yield
        finally:
            self._is_raised = False

    def __call__(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._was_pressed

    def take(self) -> bool:
        """Return whether Ctrl-C was pressed, and reset."""
        was_pressed, self._was_pressed = self._was_pressed, False
        return was_pressed

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_raised:
            raise KeyboardInterrupt
        # Only a flag, which generation checks between tokens: the answer so far stays usable.
        self._was_pressed = True


class Chat:
    """A chat in progress: session, models, screen, and written files."""

    def __init__(self, session: Session, speakers: Sequence[Speaker], screen: Screen) -> None:
        self.session = session
        self._speakers = speakers
        self._screen = screen
        self._written: set[Path] = set()
        self._ctrl_c = _CtrlC()
        self._was_stopped = False  # by Ctrl-C, since the last line

    def run(self) -> int:
        """Process input lines until the end. Returns the number of failed lines."""
        # A script must end on Ctrl-C, so keep Python's handler there.
        with self._ctrl_c.handled() if self._screen.is_interactive else nullcontext():
            return self._act_on_lines()

    def _act_on_lines(self) -> int:
        failed = 0
        while (line := self._next_line()) is not None:
            try:
                if line.strip() and not self._act(line):
                    break
            except UsageError as error:
                failed += 1
                self._screen.fault(str(error))
        return failed

    def _next_line(self) -> str | None:
        """Return the next line; None at the end of input, or after two Ctrl-C in a row."""
        while True:
            try:
                # Reading blocks, so only an exception can interrupt it.
                with self._ctrl_c.raised():
                    line = self._screen.read()
            except KeyboardInterrupt:
                # A pipe has no user who could press Ctrl-C again.
                if not self._screen.is_interactive:
                    raise
                if self._was_stopped:
                    self._screen.tell("")
                    return None
                self._was_stopped = True
                self._screen.tell(f"\n{AGAIN_ENDS}")
            else:
                self._was_stopped = False
                return line

    def _act(self, line: str) -> bool:
        """Process a line. Returns whether the chat continues."""
        reply = reply_to(self.session, line)
        self.session = reply.session
        if reply.text:
            self._screen.tell(reply.text)
        match reply.action:
            case Ask() as ask:
                self._ask(ask)
            case Save(path):
                self._save(path)
            case Load(path, row):
                self._load(path, row)
            case Attach(path):
                self._attach(path)
            case End():
                return False
        return True

    def _ask(self, ask: Ask) -> None:
        """Let each model answer. The message and answers become a turn."""
        # Build all prompts before the first answer, so that an error leaves no half-answered message.
        prompts = [
            speaker.prompt(self.session.conversation(number, ask), self.session.sampling)
            for number, speaker in enumerate(self._speakers)
        ]
        pairs = zip(self._speakers, prompts, strict=True)
        answers = [self._answer(speaker, prompt, ask) for speaker, prompt in pairs]
        if any(answer.text.strip() for answer in answers):
            self.session = self.session.answered(ask, [answer.text for answer in answers])
        elif ask.again:
            self.session = replace(self.session, attempt=ask.attempt)
            self._screen.tell("empty answer: the previous one is kept")
        else:
            self._screen.tell("empty answer: the message is removed")

    def _answer(self, speaker: Speaker, prompt: ChatPrompt, ask: Ask) -> ChatAnswer:
        """Let one model answer. Ctrl-C stops only this answer, and the next model still answers."""
        sampling = self.session.sampling
        name = speaker.name if len(self._speakers) > 1 else None
        self._screen.begin(name, opens_thought=prompt.opens_thought)
        answer = speaker.answer(
            prompt, sampling, seed=self.session.seed(ask), write=self._screen.write, should_stop=self._ctrl_c
        )
        # Reset after each answer: Ctrl-C stops one answer, not those of the other models.
        self._was_stopped |= self._ctrl_c.take()
        notes = {
            "stop": "",
            "length": f"truncated at max_new_tokens {sampling.max_new_tokens}",
            "interrupted": "stopped",
        }
        self._screen.end(notes[answer.finish_reason])
        return answer

    def _save(self, path: Path) -> None:
        rows = rows_of(self.session, [speaker.name for speaker in self._speakers])
        # Resolve links, so that two names of one file count as the same.
        write_conversation(path, rows, may_replace=path.resolve() in self._written)
        self._written.add(path.resolve())
        missing = len(self._speakers) - len(rows)
        left_out = f"; {missing} skipped because of an empty answer" if missing else ""
        self._screen.tell(f"saved {_counted(len(rows), 'conversation')} to {path}{left_out}")

    def _attach(self, path: Path) -> None:
        """Attach an image file to the next message."""
        for speaker in self._speakers:
            if not speaker.takes_pictures:
                raise UsageError(f"/image: {speaker.name} does not support images, or has no chat template")
        shown = shown_picture(str(path), Path.cwd())
        self.session = replace(self.session, attached=(*self.session.attached, shown))
        size = f"{shown.picture.width} x {shown.picture.height} pixels"
        self._screen.tell(f"attached {path} ({size}) to the next message")

    def _load(self, path: Path, row: int) -> None:
        takes_pictures = all(speaker.takes_pictures for speaker in self._speakers)
        conversation = read_conversation(path, row, takes_pictures=takes_pictures)
        self.session = self.session.loaded(conversation, num_models=len(self._speakers))
        self._screen.tell(f"loaded {_counted(len(self.session.turns), 'turn')} from {path}")


def _counted(number: int, noun: str) -> str:
    """Format a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
