"""HTTP calls to a reward server: request format and response handling.

The wire format is OpenRLHF's:

- Request: POST `{"query": [...], "prompts": [...], "labels": [...]}`. Token counts and truncation are not sent.
- Response: `{"rewards": [...]}`, one finite number per query. `rlhf serve-rm` adds `details`, the reason for each null
  reward; other keys are ignored.
- Images: sent only if `/health` reports `"images": true`. `"distinct_images": [...]` lists each image once as a
  `data:` URL, and `"images": [[...], ...]` lists indices into it for each query.

client.py selects servers and retries. rewards/judge/wire.py has the format of judges.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin

import aiohttp

from rlhf_cli.errors import RunError
from rlhf_cli.rewards.png import png_in_base64
from rlhf_cli.rewards.records import BadResult, FailureKind, ScoreRequest
from rlhf_cli.rewards.workers.pool import Failure, ItemOutcome
from rlhf_cli.rewards.workers.user_results import UserResult, checked

SERVICE = "rlhf serve-rm"
"""Service name that `rlhf serve-rm` reports at `/health`."""
_HEALTH = "health"

MAX_ANSWER_BYTES = 1 << 20
"""Response size limit, plus _ANSWER_BYTES_EACH per reward: a broken server must not exhaust the memory."""
_ANSWER_BYTES_EACH = 4096
# Health checks are short even if rewards take minutes.
_PROBE_SECONDS = 5.0
# Characters kept from a server's error message.
_MAX_DETAIL = 200
# Characters of the shortest key that is removed from responses.
_SHORTEST_SECRET = 8
BUSY = {429, 503}
# Too large or invalid as a batch. Single requests may still succeed.
_UNFIT = {413, 422}
_PASSING = {408, 425}
"""Temporary 4xx statuses, besides BUSY and _UNFIT."""
# From a proxy whose server is down.
NO_SERVER_BEHIND = {502, 503, 504}


class CallFailed(Exception):
    """The call returned no rewards. `failure.reason` completes a sentence about the server.

    `counts`: the batch may be the cause, so the call counts as a try. False if the connection could not be opened.
    """

    def __init__(self, kind: FailureKind, reason: str, *, counts: bool = True) -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)
        self.counts = counts


class RequestRefused(CallFailed):
    """The server rejected the request with a 4xx status that a retry would not change."""


class ServerBusy(Exception):
    """The server is overloaded. Retry after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"is overloaded, retry after {seconds:g} s")
        self.seconds = seconds


class UnfitBatch(Exception):
    """The server rejected the batch: it is too large, or one text is too long."""


def reward_session(key: str | None) -> aiohttp.ClientSession:
    """Open an HTTP session that sends the key, if any, with each request."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # limit=0: client.py bounds the calls per server. aiohttp's default of 100 connections would be a second limit.
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))


async def post_batch(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[ScoreRequest],
    *,
    timeout: float,
    with_images: bool = False,
) -> list[ItemOutcome]:
    """Score a batch and return one outcome per request. `with_images` sends the images too.

    Raises CallFailed (or RequestRefused), ServerBusy or UnfitBatch if the server returns no rewards.
    """
    body: dict[str, object] = {
        "query": [request.query for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
    }
    if with_images:
        try:
            # PNG encoding takes long enough to stall the event loop and, with it, calls to all other servers.
            body |= await asyncio.to_thread(_images_of, requests)
        # The image file has changed since the row was read.
        except RunError as error:
            raise CallFailed("load", f"was not called: {error}") from error
    limit = MAX_ANSWER_BYTES + _ANSWER_BYTES_EACH * len(requests)
    return _outcomes_of(await post_json(session, url, body, timeout=timeout, limit=limit), len(requests))


async def post_json(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object], *, timeout: float, limit: int
) -> bytes:
    """Send a request and return the body of the response, at most `limit` bytes, without the key.

    Raises CallFailed (or RequestRefused), ServerBusy or UnfitBatch unless the status is 200.
    """
    try:
        # A redirect would send the key and the prompts to an address that the user did not configure.
        async with session.post(
            url, json=body, timeout=aiohttp.ClientTimeout(total=timeout), allow_redirects=False
        ) as response:
            answer = _without_key(session, await read_answer(response, limit))
    except TimeoutError:
        raise CallFailed("timeout", f"did not answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise connection_failure(error) from None
    if response.status != 200:
        raise _refusal(response, answer)
    return answer


def _without_key(session: aiohttp.ClientSession, answer: bytes) -> bytes:
    """Replace the key, which a server may quote in an error message, and messages are logged and stored."""
    key = session.headers.get("Authorization", "").removeprefix("Bearer ").encode()
    # A placeholder such as "EMPTY" is no secret, and may be part of any answer.
    return answer.replace(key, b"***") if len(key) >= _SHORTEST_SECRET else answer


def _images_of(requests: Sequence[ScoreRequest]) -> dict[str, object]:
    """Return distinct images as `data:` URLs, and the image indices for each request."""
    distinct = list(dict.fromkeys(picture for request in requests for picture in request.pictures))
    numbers = {picture: number for number, picture in enumerate(distinct)}
    return {
        "distinct_images": [f"data:image/png;base64,{png_in_base64(picture)}" for picture in distinct],
        "images": [[numbers[picture] for picture in request.pictures] for request in requests],
    }


async def read_answer(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a response body. Raises CallFailed if it is larger than `limit` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise CallFailed("bad_result", f"sent a response larger than {limit:,} bytes")
    return b"".join(parts)


def connection_failure(error: aiohttp.ClientError) -> CallFailed:
    """Convert an aiohttp error into a failure."""
    if isinstance(error, aiohttp.ClientConnectorError):
        # Certificate errors have no os_error.
        cause = getattr(error, "os_error", error)
        reason = f"cannot be reached ({getattr(cause, 'strerror', None) or cause})"
        return CallFailed("unreachable", reason, counts=False)
    return CallFailed("crashed", f"dropped the connection ({type(error).__name__})")


def _refusal(response: aiohttp.ClientResponse, answer: bytes) -> Exception:
    """Convert a status other than 200 into an error."""
    reason = f"returned status {response.status}{_detail(answer)}"
    if response.status in BUSY:
        return ServerBusy(_seconds(response.headers.get("Retry-After")))
    if response.status in _UNFIT:
        return UnfitBatch(reason)
    is_final = 400 <= response.status < 500 and response.status not in _PASSING
    return (RequestRefused if is_final else CallFailed)("raised", reason)


def parsed_json(answer: bytes) -> Any:
    """Parse JSON. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(answer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _seconds(retry_after: str | None) -> float:
    """Return the seconds to wait: `Retry-After` clamped to 0.1 to 10 s, or 1 s without a valid one."""
    # The lower bound prevents a busy loop. The upper one keeps a server usable that recovers early.
    with suppress(ValueError, TypeError):
        return min(max(0.1, float(retry_after or 1.0)), 10.0)
    return 1.0


def _detail(answer: bytes) -> str:
    """Return `: MESSAGE` from an error response, in one line; "" without a message."""
    # UTF-8 uses up to 4 bytes per character.
    text = answer[: 4 * _MAX_DETAIL].decode(errors="replace")
    with suppress(ValueError, TypeError, KeyError):
        found = parsed_json(answer)
        # `rlhf serve-rm` and FastAPI have `detail`; endpoints in the form of OpenAI have `error`.
        text = str(found["detail"] if "detail" in found else found["error"]["message"])
    line = in_one_line(text)
    return f": {line}" if line else ""


def in_one_line(text: str) -> str:
    """Return the start of a text in one line, to quote it in a message."""
    return " ".join(text.split())[:_MAX_DETAIL]


def _outcomes_of(content: bytes, expected: int) -> list[ItemOutcome]:
    """Parse the outcomes. Raises CallFailed unless the body is `{"rewards": [...]}` with the expected length."""
    try:
        answer = parsed_json(content)
    except ValueError:
        raise CallFailed("bad_result", f"sent a response that is not JSON{_detail(content)}") from None
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise CallFailed("bad_result", 'sent a response without {"rewards": [...]}')
    try:
        rewards = checked(answer["rewards"], expected)
    except BadResult as error:
        raise CallFailed("bad_result", str(error)) from None
    details = answer.get("details")
    reasons = details if isinstance(details, list) and len(details) == expected else [""] * expected
    return [
        ItemOutcome(reward["value"]) if reward["value"] is not None else ItemOutcome(failure=_failure(reward, reason))
        for reward, reason in zip(rewards, reasons, strict=True)
    ]


def _failure(reward: UserResult, detail: object) -> Failure:
    line = in_one_line(str(detail or ""))
    return Failure("bad_result", f"failed: {line}" if line else reward["problem"])


async def probe(session: aiohttp.ClientSession, url: str, *, timeout: float) -> None:
    """Run a health check. Raises CallFailed like `_health_of`, or if `rlhf serve-rm` rejects the key."""
    state = await _health_of(session, url, timeout=timeout)
    if state.get("service") == SERVICE and not state.get("authorised"):
        raise CallFailed("raised", "rejects this key, or requires one")


async def takes_images(session: aiohttp.ClientSession, url: str, *, timeout: float) -> bool:
    """Return whether a server supports images.

    Raises CallFailed like `_health_of` with `is_sure`: a server that is in trouble right now may support images.
    """
    return (await _health_of(session, url, timeout=timeout, is_sure=True)).get("images") is True


async def _health_of(
    session: aiohttp.ClientSession, url: str, *, timeout: float, is_sure: bool = False
) -> dict[str, Any]:
    """Return a server's health report; empty for third-party servers without a health endpoint."""
    return (await state_at(session, urljoin(url, _HEALTH), timeout=timeout, is_sure=is_sure))[1]


async def state_at(
    session: aiohttp.ClientSession, url: str, *, timeout: float, is_sure: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return status and JSON object at an address: 0 if the server dropped the connection, {} without an object.

    Raises CallFailed if no server responds. With `is_sure`, a dropped connection or 5xx status also raises.
    """
    limit = aiohttp.ClientTimeout(total=min(timeout, _PROBE_SECONDS))
    try:
        async with session.get(url, timeout=limit, allow_redirects=False) as response:
            content = _without_key(session, await read_answer(response, MAX_ANSWER_BYTES))
    except TimeoutError:
        raise CallFailed("timeout", f"did not answer within {limit.total:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise connection_failure(error) from None
    except aiohttp.ClientError as error:
        if is_sure:
            raise connection_failure(error) from None
        # The server accepted the connection. Third-party servers need not support GET.
        return 0, {}
    if response.status in NO_SERVER_BEHIND or (is_sure and response.status >= 500):
        raise CallFailed("raised", f"returned status {response.status}{_detail(content)}")
    with suppress(ValueError):
        state = parsed_json(content)
        return response.status, state if isinstance(state, dict) else {}
    return response.status, {}
