"""Agent programs as generators, and engines that answer with text from a function."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from model_templates import FAMILIES

from rlhf_cli.agents.agent_process import ProgramEnd
from rlhf_cli.agents.agent_programs import Asked, Ended, Event, Started
from rlhf_cli.agents.chat_records import ChatRequest, Completion, Refused
from rlhf_cli.agents.chat_requests import chat_request
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.tool_dialogues import ToolDialogues

Answers = list[Completion | Refused]
Program = Generator[list[ChatRequest], Answers, ProgramEnd]
"""Yields concurrent requests, receives their answers, and returns the program's end."""


def dialogues_of(name: str) -> tuple[ToolDialogues, Any]:
    """Return the tool dialogues and tokenizer for a model family."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    ends = tokenizer.convert_tokens_to_ids([family.end])
    template = ChatTemplate(tokenizer)
    return ToolDialogues(template, tokenizer, end_ids=ends, vocab_size=len(tokenizer)), tokenizer


def asked(messages: Sequence[Mapping[str, object]], *, first: bool = True, **more: object) -> ChatRequest:
    """Return a chat request from an OpenAI request body."""
    return chat_request({"model": "x", "messages": list(messages), **more}, is_first_try=first)


class FakePrograms:
    """Programs without processes: `program` creates one from a row."""

    def __init__(self, program: Callable[[Mapping[str, Any]], Program]) -> None:
        self._program = program
        self._events: list[Event] = []
        self._running: dict[int, Program] = {}
        self._open: dict[int, dict[int, Completion | Refused | None]] = {}  # answers by ticket, per episode
        self._count = 0
        self.dropped: list[int] = []

    def start(self, episode: int, row: Mapping[str, Any]) -> None:
        self._running[episode] = self._program(row)
        self._events.append(Started(episode))
        self._go_on(episode, None)

    def _go_on(self, episode: int, answers: Answers | None) -> None:
        program = self._running[episode]
        try:
            requests = next(program) if answers is None else program.send(answers)
        except StopIteration as stop:
            self._events.append(Ended(episode, stop.value))
            return
        tickets = range(self._count, self._count + len(requests))
        self._count += len(requests)
        self._open[episode] = dict.fromkeys(tickets)
        self._events += [Asked(episode, *pair) for pair in zip(tickets, requests, strict=True)]

    def answer(self, ticket: int, answer: Completion | Refused) -> None:
        episode, answers = next(pair for pair in self._open.items() if ticket in pair[1])
        assert answers[ticket] is None, "a ticket is answered twice"
        answers[ticket] = answer
        known = [one for one in answers.values() if one is not None]
        if len(known) == len(answers):
            self._go_on(episode, known)

    def end(self, episode: int) -> None:
        self.dropped.append(episode)

    def collect(self, timeout: float | None = None) -> list[Event]:
        events, self._events = self._events, []
        return events


class TextEngines:
    """Answers requests with text computed from the prompt text and the request number.

    Text that ends with "…" is truncated there.
    """

    def __init__(self, tokenizer: Any, text: Callable[[str, int], str], *, end: str) -> None:
        self._tokenizer, self._text, self._end = tokenizer, text, end
        self.batches: list[list[GenerationRequest]] = []
        self.sampling: list[SamplingParams] = []
        self.sampled: list[tuple[list[int], Generation]] = []
        self._left: list[tuple[int, Generation]] = []

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        assert not self._left, "a batch begins before the end of the one before"
        self._num_asked = 0
        self.sampling.append(sampling)
        self.batches.append([])
        self.add(requests)

    def add(self, requests: list[GenerationRequest]) -> None:
        self.batches[-1] += requests
        for place, request in enumerate(requests, start=self._num_asked):
            number = len(self.sampled)
            text = self._text(self._tokenizer.decode(request.prompt_ids), number)
            is_cut = text.endswith("…")
            written = text.removesuffix("…") + ("" if is_cut else self._end)
            ids = self._tokenizer(written, add_special_tokens=False)["input_ids"]
            logprobs = [-(number + 1) - token / 1000 for token in ids]
            found = Generation(ids, logprobs, "length" if is_cut else "stop", 3)
            self.sampled.append((request.prompt_ids, found))
            self._left.append((place, found))
        self._num_asked += len(requests)

    @property
    def is_generating(self) -> bool:
        return bool(self._left)

    def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        found, self._left = self._left, []
        return found

    def cut(self, max_tokens: int) -> None:
        self._left = []

    def sleep(self) -> None: ...
