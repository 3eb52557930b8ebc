"""HTTP application of `rlhf view`: the page, and its data as JSON.

All addresses begin with a random key. Requests are answered only with it, and only under a loopback host name: another
site could otherwise resolve its own name to 127.0.0.1 and read the responses (DNS rebinding).
"""

import asyncio
import hmac
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rlhf_cli.tracking.view.explanations import Explanations
from rlhf_cli.tracking.view.front_end import SHELL, TYPES, content_security_policy, files
from rlhf_cli.tracking.view.index import COLUMNS, Query, SampleIndex
from rlhf_cli.tracking.view.runs import SAMPLE_FILES, ViewedRun, ViewedRuns

_SERVED = "; connect-src 'self'; frame-ancestors 'none'"
_HOSTS = ("127.0.0.1", "localhost", "::1")
_INDEX_SECONDS = 0.25
"""Time per request for indexing new samples and for text search. The page requests the rest."""
_ROWS, _MAX_ROWS = 50, 200
_SHOWN_CHARACTERS = 240
"""Characters of a text in a list of samples."""
_LISTED = ("number", "id", *COLUMNS[:-1], "verdict", "finish_reason", "response", "messages")
"""Keys of a sample in a list. The rest is in the response for one sample."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def view_app(runs: ViewedRuns, *, key: str) -> web.Application:
    """Build the application for the runs, at the addresses `/KEY/...`."""
    app = web.Application(middlewares=[_guarded(key)])
    parts = files()
    policy = content_security_policy(parts[SHELL].read_text(encoding="utf-8"), "'self'") + _SERVED

    async def file(request: web.Request) -> web.Response:
        path = parts[request.match_info.get("name") or SHELL]
        text = await asyncio.to_thread(path.read_text, encoding="utf-8")
        return web.Response(text=text, content_type=TYPES[path.suffix])

    async def secured(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(
            {
                "Content-Security-Policy": policy,
                "X-Content-Type-Options": "nosniff",
                # The address contains the key.
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-store",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Server": "rlhf",
            }
        )

    app.on_response_prepare.append(secured)
    app.router.add_get("/{key}/", file)
    app.router.add_get("/{key}/page/{name}", file)
    for name in _ANSWERS:
        app.router.add_get(f"/{{key}}/api/{name}", _answered(name, runs))
    app.router.add_get("/{key}/api/image", _image(runs))
    explanations = Explanations()
    app.router.add_get("/{key}/api/explanation", _explanation(runs, explanations))
    app.router.add_post("/{key}/api/explanation", _explanation(runs, explanations))

    async def close(_: web.Application) -> None:
        await explanations.close()

    app.on_cleanup.append(close)
    return app


def _guarded(key: str) -> Any:
    """Refuse requests without the key or under another host name, and report invalid parameters."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if urlsplit(f"//{request.host}").hostname not in _HOSTS:
            return web.Response(status=421, text="open this page at 127.0.0.1")
        given = request.path.split("/", 2)[1]
        # Constant-time comparison: response times must not reveal the key.
        if not hmac.compare_digest(given.encode(), key.encode()):
            return web.Response(status=403, text="open the address that rlhf view printed: it contains a key")
        try:
            return await handler(request)
        except (KeyError, ValueError) as error:
            return web.json_response({"detail": f"not found or invalid: {error}"}, status=404)

    return guarded


Parameters = Mapping[str, str]


def answer(name: str, runs: ViewedRuns, parameters: Parameters) -> str:
    """Return the JSON at /api/NAME. Raises KeyError or ValueError if a parameter is missing or invalid."""
    return _json(_ANSWERS[name](runs, parameters))


def _answered(name: str, runs: ViewedRuns) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        # In a thread: a large file must not delay other requests.
        text = await asyncio.to_thread(answer, name, runs, request.query)
        return web.Response(text=text, content_type="application/json")

    return handler


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _run_of(runs: ViewedRuns, parameters: Parameters) -> ViewedRun:
    return runs[int(parameters["run"])]


def _runs(runs: ViewedRuns, _: Parameters) -> list[dict[str, Any]]:
    return [run.description() for run in runs.current()]


def _metrics(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    return _run_of(runs, parameters).metrics(parameters.get("cursor", ""))


def _settings(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    return _run_of(runs, parameters).settings()


def _query(parameters: Parameters, *, orders: tuple[str, ...] = ("number", *COLUMNS)) -> Query:
    """Return the query of a request: `COLUMN_min`, `COLUMN_max`, `order`, `descending`, `text`."""
    bounds = {
        name: (_number(parameters.get(f"{name}_min")), _number(parameters.get(f"{name}_max"))) for name in COLUMNS
    }
    order = parameters.get("order", orders[0])
    if order not in orders:
        raise ValueError(f"order {order}")
    return Query(
        {name: ends for name, ends in bounds.items() if ends != (None, None)},
        order,
        parameters.get("descending") == "1",
        parameters.get("text", ""),
    )


def _number(text: str | None) -> float | None:
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError(text)
    return value


def _part(parameters: Parameters) -> dict[str, int]:
    skip, limit = int(parameters.get("skip", 0)), int(parameters.get("limit", _ROWS))
    return {"skip": max(0, skip), "limit": max(1, min(limit, _MAX_ROWS))}


def _indexed(runs: ViewedRuns, parameters: Parameters) -> tuple[SampleIndex, float]:
    """Return the index of a samples file, extended for some time, and the indexed fraction."""
    index = _run_of(runs, parameters).samples(parameters.get("file", SAMPLE_FILES[0]))
    done, size = index.extend(_INDEX_SECONDS)
    return index, done / size if size else 1.0


def _samples(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    index, indexed = _indexed(runs, parameters)
    page = index.page(_query(parameters), **_part(parameters), seconds=_INDEX_SECONDS)
    return {
        "rows": page.rows if parameters.get("texts") == "1" else list(map(_listed, page.rows)),
        "next": page.next,
        "total": page.total,
        "indexed": indexed,
    }


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample for a list, with truncated text."""
    shown = {name: row[name] for name in _LISTED if name in row}
    text = shown.get("response") or (_json(row["messages"]) if row.get("messages") else "")
    return {**shown, "response": str(text)[:_SHOWN_CHARACTERS], "messages": None}


def _sample(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    index, number = (
        _run_of(runs, parameters).samples(parameters.get("file", SAMPLE_FILES[0])),
        int(parameters["number"]),
    )
    try:
        return index.row(number)
    except KeyError:
        index.extend(_INDEX_SECONDS)
        return index.row(number)


def _groups(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    index, indexed = _indexed(runs, parameters)
    query = _query(parameters, orders=("step", "mean", "spread"))
    return {"groups": index.groups(query, **_part(parameters)), "indexed": indexed}


def _histogram(runs: ViewedRuns, parameters: Parameters) -> dict[str, Any]:
    column = parameters["column"]
    if column not in COLUMNS:
        raise KeyError(column)
    index, indexed = _indexed(runs, parameters)
    return {**index.histogram(_query(parameters), column), "indexed": indexed}


_ANSWERS: dict[str, Callable[[ViewedRuns, Parameters], Any]] = {
    "runs": _runs,
    "metrics": _metrics,
    "settings": _settings,
    "samples": _samples,
    "sample": _sample,
    "groups": _groups,
    "histogram": _histogram,
}


def _image(runs: ViewedRuns) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        content = await asyncio.to_thread(_run_of(runs, request.query).image, request.query["name"])
        return web.Response(body=content, content_type="image/png")

    return handler


def _explanation(runs: ViewedRuns, explanations: Explanations) -> Handler:
    """Answer with the state of a training sample's explanation. POST starts it."""

    async def handler(request: web.Request) -> web.Response:
        run = _run_of(runs, request.query)
        if not run.is_explained:
            raise KeyError("explanation")
        row = await asyncio.to_thread(_sample, runs, {**request.query, "file": SAMPLE_FILES[0]})
        if request.method == "POST":
            explanations.start(run.path, str(row["id"]))
        return web.json_response(explanations.state(run.path, str(row["id"])), dumps=_json)

    return handler
