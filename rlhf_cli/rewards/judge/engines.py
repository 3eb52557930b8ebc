"""Judge models in engines that this command has started, in a background thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.rewards.judge.cache import CompletionCache
from rlhf_cli.rewards.judge.wire import TRUNCATED, Question
from rlhf_cli.rewards.records import BadResult, FailureKind
from rlhf_cli.rewards.remote.state import WaitingItem
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Interval for new questions while engines generate."""


class ChatEngines(Protocol):
    """Engines with a judge model; the methods of rollout engines that judging needs."""

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None: ...

    def add(self, requests: list[GenerationRequest]) -> None: ...

    @property
    def is_generating(self) -> bool: ...

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]: ...

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...


@dataclass(frozen=True)
class ChatModel:
    """How a judge model is asked.

    - `name`: as set by the user, for messages.
    - `identity`: what must be equal for equal answers to a question: weights and arguments.
    - `encode`: returns the request for a question. Raises BadResult if it is too long, or has images that the model
      cannot read.
    - `decode`: returns the text of tokens without special tokens.
    """

    name: str
    identity: Mapping[str, object]
    encode: Callable[[Question], GenerationRequest]
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams

    def key(self, question: Question) -> dict[str, object]:
        """Return what identifies a question to this model in a cache."""
        images = [picture.digest for picture in question.pictures]
        return {**self.identity, "question": question.text, "images": images}


class JudgeEngines:
    """Asks a judge model; a context manager that owns the background thread, but not the engines.

    Engines wake for questions, and sleep when all are answered.

    - `waits`: whether to ask only when all questions of a scoring round are known: rollout engines use the same GPUs
      until then, and a batch of known questions has reproducible answers.
    - `cache`: completions of equal questions; closed with the thread.
    - `retries`: tries per question after an answer without a valid verdict, if answers are sampled.
    """

    def __init__(
        self,
        engines: ChatEngines,
        model: ChatModel,
        *,
        waits: bool,
        retries: int,
        cache: CompletionCache | None = None,
    ) -> None:
        self.waits = waits
        self._engines, self._model, self._cache = engines, model, cache
        self._retries = 0 if model.sampling.greedy else retries
        # All state below belongs to the event loop thread, so it needs no lock.
        self._waiting: deque[WaitingItem] = deque()
        # Questions to the engines, by request number.
        self._asked: list[WaitingItem] = []
        self._news = asyncio.Event()
        self._thread = LoopThread("judge")
        self._main = self._thread.run(self._begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread. Pending questions fail."""
        self._thread.end(self._end_main)
        if self._cache is not None:
            self._cache.close()

    def submit(self, questions: Sequence[Question]) -> "list[Future[ItemOutcome]]":
        """Queue questions and return their futures. Answers without a verdict become failures.

        If the engines are lost, the error is raised here and by all pending futures.
        """
        if self._main.done() and (error := self._main.exception()) is not None:
            raise error
        items = [WaitingItem(question, Future()) for question in questions]
        self._thread.call_soon(self._enqueue, items)
        return [item.future for item in items]

    async def _begin(self) -> "asyncio.Task[None]":
        main = asyncio.create_task(self._serve())
        main.add_done_callback(self._leave_nobody_waiting)
        return main

    async def _end_main(self) -> None:
        self._main.cancel()
        await asyncio.wait({self._main})

    def _leave_nobody_waiting(self, main: "asyncio.Task[None]") -> None:
        defect = None if main.cancelled() else main.exception()
        if defect is not None:
            logger.error("the judge has stopped", exc_info=defect)
        for item in [*self._asked, *self._waiting]:
            if item.future.done():
                continue
            if defect is None:
                item.end(ItemOutcome(failure=Failure("crashed", "was cancelled")))
            else:
                item.future.set_exception(defect)

    def _enqueue(self, items: Sequence[WaitingItem]) -> None:
        self._waiting.extend(items)
        self._news.set()

    async def _serve(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if requests := self._next_requests():
                await self._answer(requests)

    async def _answer(self, requests: list[GenerationRequest]) -> None:
        """Ask all waiting questions, also those that arrive meanwhile."""
        engines = self._engines
        engines.wake_cache()
        engines.begin(requests, self._model.sampling)
        while engines.is_generating:
            for number, response in await engines.collect(_LOOK_SECONDS):
                self._take(self._asked[number], response)
            if added := self._next_requests():
                engines.add(added)
        engines.sleep()
        self._asked = []

    def _next_requests(self) -> list[GenerationRequest]:
        """Return the requests for waiting questions whose answers are not known."""
        requests = []
        while self._waiting:
            item = self._waiting.popleft()
            if item.future.cancelled() or self._is_known(item):
                continue
            try:
                request = self._model.encode(_question(item))
            except BadResult as error:
                item.end(self._failed("unjudged", error))
                continue
            requests.append(replace(request, seed=request.seed + item.tries))
            self._asked.append(item)
        return requests

    def _is_known(self, item: WaitingItem) -> bool:
        """Answer a question from the cache. Returns whether it had the answer."""
        question = _question(item)
        stored = None if self._cache is None else self._cache.completion_of(self._model.key(question))
        if stored is None:
            return False
        try:
            item.end(ItemOutcome(question.read(stored)))
        except BadResult:  # an earlier version may have read it differently
            return False
        return True

    def _take(self, item: WaitingItem, response: Generation) -> None:
        question, text = _question(item), self._model.decode(response.token_ids)
        try:
            if response.finish_reason == "length":
                raise BadResult(f"{TRUNCATED} (max_tokens in --judge_args, --judge_max_len)")
            outcome = ItemOutcome(question.read(text))
        except BadResult as error:
            item.tries += 1
            if item.tries <= self._retries:
                self._waiting.append(item)
            else:
                item.end(self._failed("bad_result", error))
            return
        if self._cache is not None:
            self._cache.store(self._model.key(question), text)
        item.end(outcome)

    def _failed(self, kind: FailureKind, error: BadResult) -> ItemOutcome:
        return ItemOutcome(failure=Failure(kind, f"{self._model.name} {error}"))


def _question(item: WaitingItem) -> Question:
    assert isinstance(item.request, Question)
    return item.request
