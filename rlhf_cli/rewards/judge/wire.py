"""Chat completions of OpenAI-compatible endpoints, for judges. The client is that of reward servers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.judge.cache import CompletionCache
from rlhf_cli.rewards.png import png_in_base64
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.remote.call import (
    MAX_ANSWER_BYTES,
    CallFailed,
    in_one_line,
    parsed_json,
    post_json,
    reward_session,
    state_at,
)
from rlhf_cli.rewards.remote.state import Wire
from rlhf_cli.rewards.workers.pool import ItemOutcome

if TYPE_CHECKING:
    from rlhf_cli.models.vision.pictures import Picture

TRUNCATED = "reached its token limit before the verdict"
"""Completes a sentence about a judge."""
_MAX_LISTED = 5
_UNAUTHORISED = {401, 403}


@dataclass(frozen=True)
class Question:
    """A question to a judge.

    `read` returns the verdict in a completion, as JSON values. It raises BadResult without a valid one. `schema` is the
    JSON Schema of the verdict.
    """

    text: str
    read: Callable[[str], object]
    pictures: "tuple[Picture, ...]" = ()
    schema: Mapping[str, object] = field(default_factory=dict)


def judge_wire(
    models: Mapping[str, str], arguments: Mapping[str, object], *, num_calls: int, cache: CompletionCache | None = None
) -> Wire:
    """Return the wire format for judges.

    Args:
        models: model name by URL.
        arguments: further fields of a request; None leaves a default out.
        num_calls: concurrent requests per judge.
        cache: completions of equal requests, which are not sent again.
    """

    async def post(
        session: aiohttp.ClientSession, url: str, questions: Sequence[Question], *, timeout: float, with_images: bool
    ) -> list[ItemOutcome]:
        # One question per request: the client has a batch size of 1.
        (question,) = questions
        content: object = question.text
        if question.pictures:
            # In a thread, because encoding takes long.
            content = await asyncio.to_thread(_parts, question)
        body = {"model": models[url], "messages": [{"role": "user", "content": content}], "temperature": 0}
        sent = {name: value for name, value in (body | dict(arguments)).items() if value is not None}
        stored = None if cache is None else cache.completion_of(sent)
        # An earlier version may have read it differently.
        with suppress(BadResult):
            if stored is not None:
                return [ItemOutcome(question.read(stored))]
        received = await post_json(session, f"{url}/chat/completions", sent, timeout=timeout, limit=MAX_ANSWER_BYTES)
        try:
            answer = _text_of(received)
            verdict = question.read(answer)
        except BadResult as error:
            raise CallFailed("bad_result", str(error)) from None
        if cache is not None:
            cache.store(sent, answer)
        return [ItemOutcome(verdict)]

    async def takes_images(*_: object, **__: object) -> bool:
        # Endpoints do not say whether their model reads images; one that does not rejects the request.
        return True

    return Wire("judge", num_calls, post, _probe, takes_images)


def _parts(question: Question) -> list[dict[str, object]]:
    """Return the images of the prompt and the text as content in OpenAI format."""
    urls = (f"data:image/png;base64,{png_in_base64(picture)}" for picture in question.pictures)
    images: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": question.text}]


def _text_of(content: bytes) -> str:
    """Return the text of a chat completion. Raises BadResult if it is not finished."""
    try:
        answer = parsed_json(content)
    except ValueError:
        quoted = in_one_line(content[:1000].decode(errors="replace"))
        raise BadResult(f"sent a response that is not JSON: {quoted}") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise BadResult('sent a response without {"choices": [{"message": ...}]}')
    # Before the end, the last JSON object may be one that the judge quotes.
    if choice.get("finish_reason") == "length":
        raise BadResult(f"{TRUNCATED} (max_tokens in --judge_args)")
    if choice.get("finish_reason") == "content_filter":
        raise BadResult("was stopped by its content filter")
    if not isinstance(message.get("content"), str) or not message["content"].strip():
        raise BadResult("sent an empty answer")
    return str(message["content"])


async def _probe(session: aiohttp.ClientSession, url: str, *, timeout: float) -> None:
    """Run a health check. Raises CallFailed if no server responds, or if it rejects the key."""
    await _models_at(session, url, timeout=timeout)


async def _models_at(session: aiohttp.ClientSession, url: str, *, timeout: float) -> list[str]:
    """Return the models that an endpoint lists; none if it has no list. Raises CallFailed like `_probe`."""
    status, found = await state_at(session, f"{url}/models", timeout=timeout)
    if status in _UNAUTHORISED:
        raise CallFailed("raised", "rejects this key, or requires one")
    models = found.get("data")
    listed = models if isinstance(models, list) else []
    return [model["id"] for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]


def models_of_judges(urls: Sequence[str], name: str | None, *, key: str | None, timeout: float) -> dict[str, str]:
    """Return the model of each judge: `name`, or else the only one that the endpoint lists.

    Raises UsageError if a judge does not respond, rejects the key, or does not list exactly one model.
    """

    async def found() -> list[list[str] | BaseException]:
        async with reward_session(key) as session:
            calls = [_models_at(session, url, timeout=timeout) for url in urls]
            return await asyncio.gather(*calls, return_exceptions=True)

    return {url: _only(url, name, models) for url, models in zip(urls, asyncio.run(found()), strict=True)}


def _only(url: str, name: str | None, models: list[str] | BaseException) -> str:
    if isinstance(models, BaseException):
        raise UsageError(f"--judge {url} {models}")
    if name is not None:
        return name
    if len(models) != 1:
        listed = f"lists {len(models)} models ({', '.join(models[:_MAX_LISTED])})" if models else "lists no models"
        raise UsageError(f"--judge {url} {listed}: set --judge_model")
    return models[0]
