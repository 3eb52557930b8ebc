"""One call of a reward server over HTTP: the request, and the meaning of the answers.

The wire format is OpenRLHF's: POST `{"query": [...], "prompts": [...], "labels": [...]}`, answered by `{"rewards":
[...]}` with one finite number for each query. Other keys are ignored but for `details`, in which `rlhf serve-rm`
explains why a reward is null. Neither numbers of tokens nor whether a response was cut are sent. A server whose
`/health` reports `"images": true` gets the pictures of prompts too: each of them once in `"pictures": [...]`, a list of
`data:` URLs, and `"images": [[...], ...]`, the numbers of its pictures for each query. The choice of the server and
retries are in client.py.
"""

import asyncio
import json
from collections.abc import Sequence
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
"""The name that our own server reports at `/health`."""
HEALTH = "health"

MAX_ANSWER_BYTES = 1 << 20
"""Largest answer that is read, beside ANSWER_BYTES_EACH for each reward: a broken server must not fill the memory."""
ANSWER_BYTES_EACH = 4096
PROBE_SECONDS = 5.0
MAX_DETAIL = 200  # characters of a server's message about a failure
BUSY = {429, 503}
UNFIT = {413, 422}
PASSING = {408, 425}
"""Statuses of 400 to 499, besides BUSY and UNFIT, that may be gone at the next try."""
NO_SERVER_BEHIND = {502, 503, 504}


class CallFailed(Exception):
    """No reward came back: `failure.reason` ends a sentence about the server.

    `counts` is whether the batch itself may be the cause: False if no connection was made.
    """

    def __init__(self, kind: FailureKind, reason: str, *, counts: bool = True) -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)
        self.counts = counts


class RequestRefused(CallFailed):
    """The server does not take such requests (status 400 to 499), which will not change at another try."""


class ServerBusy(Exception):
    """The server has no room now; it asks to come again after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"is full, and asks to come again in {seconds:g} s")
        self.seconds = seconds


class UnfitBatch(Exception):
    """The server does not take this batch as it is: too large, or with a text that is too long."""


def reward_session(key: str | None) -> aiohttp.ClientSession:
    """Return a session that shows the key, if there is one, and never follows a server to another address."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))


async def post_batch(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[ScoreRequest],
    *,
    timeout: float,
    with_images: bool = False,
) -> list[ItemOutcome]:
    """Return the outcome of each request of a batch, which has its pictures `with_images`.

    Raises CallFailed, also as RequestRefused, ServerBusy or UnfitBatch if the server has no rewards for the batch.
    """
    body: dict[str, object] = {
        "query": [request.query for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
    }
    if with_images:
        try:
            body |= await asyncio.to_thread(_images_of, requests)
        except RunError as error:  # a file that has changed since its row was read
            raise CallFailed("load", f"was not asked: {error}") from error
    limit = MAX_ANSWER_BYTES + ANSWER_BYTES_EACH * len(requests)
    try:
        async with session.post(
            url, json=body, timeout=aiohttp.ClientTimeout(total=timeout), allow_redirects=False
        ) as response:
            answer = await read_answer(response, limit)
    except TimeoutError:
        raise CallFailed("timeout", f"did not answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise connection_failure(error) from None
    if response.status != 200:
        raise _refusal(response, answer)
    return outcomes_of(answer, len(requests))


def _images_of(requests: Sequence[ScoreRequest]) -> dict[str, object]:
    """Return the distinct pictures as `data:` URLs, and the numbers of the pictures of each request."""
    distinct = list(dict.fromkeys(picture for request in requests for picture in request.pictures))
    numbers = {picture: number for number, picture in enumerate(distinct)}
    return {
        "pictures": [f"data:image/png;base64,{png_in_base64(picture)}" for picture in distinct],
        "images": [[numbers[picture] for picture in request.pictures] for request in requests],
    }


async def read_answer(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of an answer. Raises CallFailed if it has more than `limit` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise CallFailed("bad_result", f"sent an answer of more than {limit:,} bytes")
    return b"".join(parts)


def connection_failure(error: aiohttp.ClientError) -> CallFailed:
    """Return the failure of a call without an answer, by aiohttp's error."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = getattr(error, "os_error", error)  # a wrong certificate has none
        reason = f"cannot be reached ({getattr(cause, 'strerror', None) or cause})"
        return CallFailed("unreachable", reason, counts=False)
    return CallFailed("crashed", f"dropped the connection ({type(error).__name__})")


def _refusal(response: aiohttp.ClientResponse, answer: bytes) -> Exception:
    """Return the error for a status other than 200."""
    reason = f"answered with status {response.status}{_detail(answer)}"
    if response.status in BUSY:
        return ServerBusy(_seconds(response.headers.get("Retry-After")))
    if response.status in UNFIT:
        return UnfitBatch(reason)
    is_final = 400 <= response.status < 500 and response.status not in PASSING
    return (RequestRefused if is_final else CallFailed)("raised", reason)


def _parsed(answer: bytes) -> Any:
    """Return the JSON of an answer. Raise ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(answer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _seconds(retry_after: str | None) -> float:
    """Return how long to wait: the server's wish, bounded by a tenth of a second and ten seconds, else one second."""
    with suppress(ValueError, TypeError):
        return min(max(0.1, float(retry_after or 1.0)), 10.0)
    return 1.0


def _detail(answer: bytes) -> str:
    """Return `: the server's message` in one line."""
    text = answer[: 4 * MAX_DETAIL].decode(errors="replace")
    with suppress(ValueError, TypeError, KeyError):
        text = str(_parsed(answer)["detail"])
    line = " ".join(text.split())[:MAX_DETAIL]
    return f": {line}" if line else ""


def outcomes_of(content: bytes, expected: int) -> list[ItemOutcome]:
    """Return the outcomes in an answer. Raise CallFailed unless it is `{"rewards": [...]}` with as many as expected."""
    try:
        answer = _parsed(content)
    except ValueError:
        raise CallFailed("bad_result", f"sent an answer that is no JSON{_detail(content)}") from None
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise CallFailed("bad_result", 'sent an answer without {"rewards": [...]}')
    try:
        rewards = checked(answer["rewards"], expected)
    except BadResult as error:
        raise CallFailed("bad_result", str(error)) from None
    details = answer.get("details")
    told = details if isinstance(details, list) and len(details) == expected else [""] * expected
    return [
        ItemOutcome(found["value"]) if found["value"] is not None else ItemOutcome(failure=_failure(found, detail))
        for found, detail in zip(rewards, told, strict=True)
    ]


def _failure(found: UserResult, detail: object) -> Failure:
    line = " ".join(str(detail or "").split())[:MAX_DETAIL]
    return Failure("bad_result", f"failed: {line}" if line else found["problem"])


async def probe(session: aiohttp.ClientSession, url: str, *, timeout: float) -> None:
    """Raise CallFailed as `health_of`, or if a server of ours does not take the key."""
    state = await health_of(session, url, timeout=timeout)
    if state.get("service") == SERVICE and not state.get("authorised"):
        raise CallFailed("raised", "does not take this key, or asks for one")


async def takes_images(session: aiohttp.ClientSession, url: str, *, timeout: float) -> bool:
    """Return whether a server reports that it takes pictures. Raise CallFailed as `health_of`, also for a server that
    breaks off or has an error of its own: it may see pictures all the same.
    """
    return (await health_of(session, url, timeout=timeout, is_sure=True)).get("images") is True


async def health_of(
    session: aiohttp.ClientSession, url: str, *, timeout: float, is_sure: bool = False
) -> dict[str, Any]:
    """Return the report of a server at its health endpoint; an empty one if it has none, as servers of others.

    Raises CallFailed unless a server answers there, in whatever way; if it has to be `is_sure`, also if the connection
    breaks or the server has an error.
    """
    limit = aiohttp.ClientTimeout(total=min(timeout, PROBE_SECONDS))
    try:
        async with session.get(urljoin(url, HEALTH), timeout=limit, allow_redirects=False) as response:
            content = await read_answer(response, MAX_ANSWER_BYTES)
    except TimeoutError:
        raise CallFailed("timeout", f"did not answer within {limit.total:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise connection_failure(error) from None
    except aiohttp.ClientError as error:
        if is_sure:
            raise connection_failure(error) from None
        return {}  # it took the connection, which is all that can be asked of a server that is not ours
    if response.status in NO_SERVER_BEHIND or (is_sure and response.status >= 500):
        raise CallFailed("raised", f"answered with status {response.status}{_detail(content)}")
    with suppress(ValueError):
        state = _parsed(content)
        return state if isinstance(state, dict) else {}
    return {}
