"""report.html: the front end of `rlhf view` with the data of runs, in one file that loads nothing.

The file stays at a few MB, however long the run was: samples of some steps, and means of neighboring steps.
"""

import json
import os
import re
import shlex
import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_cli.errors import one_line
from rlhf_cli.tracking.sinks import json_number, present_row, read_metrics
from rlhf_cli.tracking.thumbnails import IMAGES
from rlhf_cli.tracking.view.front_end import SHELL, TYPES, content_security_policy, files
from rlhf_cli.tracking.view.index import prompt_number
from rlhf_cli.tracking.view.runs import ViewedRun, described
from rlhf_cli.version import __version__

_REPORT_FILE = "report.html"
_MAX_RECORDS = 500
_MAX_SAMPLE_STEPS = 40
_MAX_SAMPLES_PER_STEP = 16
# Characters per prompt or response.
_MAX_TEXT = 12_000
# Characters per episode, divided equally among its messages.
_MAX_EPISODE = 48_000
# Finds the step without decoding the line: JsonLines writes it first.
_STEP = re.compile(rb'\{"step": (\d+)')
_PART = re.compile(r'"(?:\./)?page/([\w.-]+)"')


def record_report(output: Path) -> None:
    """Write the report after a run. A failure is only logged."""
    try:
        write_report(output)
    except Exception as error:  # the run has succeeded without a report
        print(f"{_REPORT_FILE} was not written: {one_line(error)}", file=sys.stderr, flush=True)


def write_report(
    output: Path, *, stages: Mapping[str, Path] | None = None, headline: Mapping[str, float | str] | None = None
) -> Path:
    """Write <output>/report.html and return its path.

    Args:
        output: run directory, or the folder for a report about multiple runs.
        stages: run directories by heading, in order. Default: `output`.
        headline: results to show first, by name.
    """
    named = stages or {output.resolve().name: output}
    data = {
        "name": output.resolve().name,
        "headline": list((headline or {}).items()),
        "note": _note(named.values()),
        "runs": [_run(name, path.resolve(), number) for number, (name, path) in enumerate(named.items())],
    }
    path = output / _REPORT_FILE
    # Replace atomically: the page may be open in a browser, or the run may be killed while writing.
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(_page(data), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    return path


def _note(paths: Iterable[Path]) -> str:
    return (
        f"Written by rlhf-cli {__version__}. All samples, and explanations of their tokens: "
        f"rlhf view {shlex.join(map(str, paths))}"
    )


def _page(data: Mapping[str, Any]) -> str:
    """Build the page: the front end with its files as data URLs, and the data."""
    parts = files()
    shell = parts[SHELL].read_text(encoding="utf-8").replace("page/served.js", "page/exported.js")
    page = _PART.sub(lambda part: f'"{_data_url(parts[part[1]].read_bytes(), TYPES[parts[part[1]].suffix])}"', shell)
    policy = content_security_policy(page, "data:")
    secured = page.replace("<meta ", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<meta ', 1)
    return secured.replace("</body>", f'<script type="application/json" id="data">{_script_json(data)}</script></body>')


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def _script_json(value: object) -> str:
    """Encode JSON such that text from a model cannot close the surrounding script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _run(name: str, path: Path, number: int) -> dict[str, Any]:
    """Return the data that the server (app.py) sends about a run. `samples`: selected rows by file."""
    run = ViewedRun(number, path, lambda _: "running")
    about = run.description()
    samples = {file: read_rollouts(run.file(file)) for file in about["files"]}
    rows = [row for part in samples.values() for row in part["rows"]]
    return {
        **about,
        "name": name,
        "metrics": _metrics(read_metrics(path)),
        "settings": run.settings(),
        "samples": samples,
        "images": _images(run, rows),
    }


def _metrics(by_step: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    evaluated = [
        {"step": step, **{name: _number(value) for name, value in metrics.items() if name.startswith("eval/")}}
        for step, metrics in by_step.items()
    ]
    records = [*_averaged(by_step), *(record for record in evaluated if len(record) > 1)]
    names = dict.fromkeys(name for metrics in by_step.values() for name in metrics)
    return {"records": records, "cursor": "", "is_first": True, "has_more": False, **described(names)}


def _averaged(by_step: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return a record per step, without evaluations; for a long run, one per `averaged` neighboring steps."""
    items = list(by_step.items())
    size = max(1, -(-len(items) // _MAX_RECORDS))
    return [_mean(items[start : start + size]) for start in range(0, len(items), size)]


def _mean(part: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for name, value in (item for _, metrics in part for item in metrics.items() if not item[0].startswith("eval/")):
        values.setdefault(name, []).append(value)
    # Times are added up: a step without a phase counts as 0.
    counts = {name: len(part) if name.startswith("time/") else len(found) for name, found in values.items()}
    record = {"step": part[-1][0], **{name: _number(sum(found) / counts[name]) for name, found in values.items()}}
    return record if len(part) == 1 else {**record, "averaged": len(part)}


def _number(value: float) -> float | str:
    """Round to six significant digits: enough to read, and small in the page."""
    return json_number(float(f"{value:.6g}"))


def read_rollouts(path: Path) -> dict[str, Any]:
    """Select samples from steps spread over the whole run, the first samples per step, with long text truncated.

    Makes two passes over the file, so that memory does not grow with it.

    Returns:
        `rows`, with their `number` in the file, from 1, and `prompt_number` as in the index; `all`: number of samples.
    """
    # (number, offset) per sample, by step.
    positions: dict[int, list[tuple[int, int]]] = {}
    number = offset = 0
    with path.open("rb") as lines:
        for line in lines:
            # A line without a newline was torn by a kill.
            found = _STEP.match(line)
            if found and line.endswith(b"\n"):
                number += 1
                positions.setdefault(int(found[1]), []).append((number, offset))
            offset += len(line)
        rows = []
        for step in _spread(sorted(positions), _MAX_SAMPLE_STEPS):
            for place, start in positions[step][:_MAX_SAMPLES_PER_STEP]:
                lines.seek(start)
                row = present_row(json.loads(lines.readline()))
                short = {name: _shorten(value, path.name) for name, value in row.items()}
                rows.append({**short, "number": place, "prompt_number": prompt_number(row)})
    return {"rows": rows, "all": number}


def _images(run: ViewedRun, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Load existing thumbnails that the samples name, as data URLs."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.get(IMAGES) or () if isinstance(name, str)):
        with suppress(KeyError):
            found[name] = _data_url(run.image(name), "image/png")
    return found


def _spread(items: list[int], limit: int) -> list[int]:
    """Select up to `limit` evenly spaced items, including the first and last."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def _shorten(value: Any, file: str, limit: int = _MAX_TEXT) -> Any:
    """Truncate long text, also inside lists and objects, with a note about the missing length."""
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]} … ({len(value) - limit} more characters in {file})"
    if isinstance(value, list):
        share = min(limit, _MAX_EPISODE // max(1, len(value)))
        return [_shorten(entry, file, share) for entry in value]
    if isinstance(value, dict):
        return {name: _shorten(entry, file, limit) for name, entry in value.items()}
    return value
