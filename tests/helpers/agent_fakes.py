"""Agent programs as generators, and engines that answer with text from a function."""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

from model_templates import FAMILIES

from rlhf_cli.agents.agent_process import ProgramEnd
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
        self.killed: list[Mapping[str, Any]] = []

    async def play(
        self,
        row: Mapping[str, Any],
        answer: Callable[[ChatRequest], Coroutine[Any, Any, Completion]],
        started: Callable[[], object],
    ) -> ProgramEnd:
        started()
        program = self._program(row)
        try:
            requests = next(program)
            while True:
                answers = await asyncio.gather(*map(answer, requests), return_exceptions=True)
                requests = program.send([self._checked(one) for one in answers])
        except StopIteration as stop:
            return stop.value
        except asyncio.CancelledError:
            self.killed.append(row)
            raise

    def _checked(self, answer: Completion | BaseException) -> Completion | Refused:
        if isinstance(answer, Completion | Refused):
            return answer
        raise answer


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

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        found, self._left = self._left, []
        return found

    def cut(self, max_tokens: int) -> None:
        self._left = []

    def sleep(self) -> None: ...
