"""Fake screen and fake model for chat tests."""

import signal

from rlhf_cli.errors import UsageError
from rlhf_cli.runs.chat.speaker import ChatAnswer, ChatPrompt


class ScriptedScreen:
    """Reads scripted lines, raises a KeyboardInterrupt in the script, and records everything shown."""

    def __init__(self, *lines, is_interactive=True):
        self.is_interactive = is_interactive
        self.lines = list(lines)
        self.told, self.faults, self.answers = [], [], []

    def read(self):
        line = self.lines.pop(0) if self.lines else None
        if line is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        return line

    def tell(self, text):
        self.told.append(text)

    def fault(self, text):
        self.faults.append(text)

    def begin(self, name, *, opens_thought):
        self.answers.append([name, "", None])

    def write(self, piece):
        self.answers[-1][1] += piece

    def end(self, note):
        self.answers[-1][2] = note


class EchoSpeaker:
    """Echoes the last message letter by letter, followed by the seed. Ctrl-C arrives after `pressed_after` letters."""

    def __init__(self, name="echo", *, pressed_after=None, room=1000):
        self.name, self.pressed_after, self.room = name, pressed_after, room
        self.takes_pictures = False
        self.asked, self.seeds = [], []

    def prompt(self, conversation, sampling):
        if len(conversation.messages) > self.room:
            raise UsageError("no room")
        return ChatPrompt(conversation.messages[-1].content, [1] * len(conversation.messages))

    def answer(self, prompt, sampling, *, seed, write, should_stop):
        self.asked.append(len(prompt.ids))
        self.seeds.append(seed)
        written = ""
        for number, letter in enumerate(prompt.text.replace("nothing", " ")):
            if number == self.pressed_after:
                self.pressed_after = None
                signal.raise_signal(signal.SIGINT)
            if should_stop():
                return ChatAnswer(written, "interrupted")
            if number == sampling.max_new_tokens:
                return ChatAnswer(written, "length")
            write(letter)
            written += letter
        return ChatAnswer(written, "stop")
