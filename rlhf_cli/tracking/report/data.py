"""Report data, read from a run directory.

Reads only; page.py and charts.py draw it.
"""

import json
import math
import re
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli.tracking.sinks import (
    EVAL_SAMPLES_FILE,
    PLAN_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    present_row,
    read_alarms,
    read_metrics,
)
from rlhf_cli.tracking.summary import Summary, summarise
from rlhf_cli.tracking.thumbnails import FOLDER, IMAGES

# Limits that keep the page at a few MB, however long the run was.
_MAX_SAMPLE_STEPS = 40
_MAX_SAMPLES_PER_STEP = 16
# Characters per prompt or response.
_MAX_TEXT = 12_000
# Characters per episode, divided equally among its messages.
_MAX_EPISODE = 48_000
THUMBNAIL = re.compile(rf"{FOLDER}/[\w-]+\.png", re.ASCII)
"""Names come from files: no other path is read, and none that leaves the run's image folder."""
# Finds the step without decoding the line: JsonLines writes it first.
_STEP = re.compile(rb'\{"step": (\d+)')
JsonObject = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True)
class ReportRollouts:
    """Samples selected from samples.jsonl or eval_samples.jsonl to fit on a page. `file` is the file name.

    `images` maps each image path in the rows to a data URL.
    """

    rows: list[JsonObject]
    num_all: int
    file: str
    images: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One run directory."""

    path: Path
    command: str
    unit: str
    outcome: str
    total_steps: int
    facts: dict[str, str]
    # By group, then by name.
    settings: dict[str, JsonObject]
    metrics: dict[int, dict[str, float]]
    rollouts: ReportRollouts
    evaluated: ReportRollouts
    summary: Summary
    # Messages of the alarms, in order.
    alarms: list[str]
    # Of PLAN_FILE: `assumed`, and `values` by name. Empty without a plan.
    plan: JsonObject


def read_stage(path: Path) -> Stage:
    """Read everything that the report shows about a run. Missing files leave their section empty."""
    run = read_object(path / RUN_FILE)
    metrics = read_metrics(path)
    return Stage(
        path=path,
        command=run.get("command", path.resolve().name),
        unit=run.get("unit", "step"),
        outcome=run.get("outcome", "unknown"),
        total_steps=run.get("total_steps", max(metrics, default=0)),
        facts=run.get("facts", {}),
        settings=read_settings(path / SETTINGS_FILE),
        metrics=metrics,
        rollouts=read_rollouts(path / SAMPLES_FILE),
        evaluated=read_rollouts(path / EVAL_SAMPLES_FILE),
        summary=summarise(path),
        alarms=read_alarms(path),
        plan=read_object(path / PLAN_FILE),
    )


def read_object(path: Path) -> JsonObject:
    """Return the object in a JSON file; empty if it does not exist."""
    found: JsonObject = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def read_settings(path: Path) -> dict[str, JsonObject]:
    """Read the settings by group, from the comment line above each group."""
    groups: dict[str, JsonObject] = {}
    if not path.exists():
        return groups
    for part in re.split(r"^# ", "\n" + path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        values = yaml.safe_load(body)
        if isinstance(values, dict):
            groups.setdefault(heading.strip() or "Settings", {}).update(values)
    return groups


def read_rollouts(path: Path) -> ReportRollouts:
    """Select samples from steps spread over the whole run, the first samples per step, with long text truncated.

    Makes two passes over the file, so that memory does not grow with it.
    """
    if not path.exists():
        return ReportRollouts([], 0, path.name)
    positions: dict[int, list[int]] = {}
    with path.open("rb") as lines:
        position = 0
        for line in lines:
            # A line without a newline was torn by a kill.
            found = _STEP.match(line)
            if found and line.endswith(b"\n"):
                positions.setdefault(int(found[1]), []).append(position)
            position += len(line)
        chosen = _spread(sorted(positions), _MAX_SAMPLE_STEPS)
        rows = []
        for start in (start for step in chosen for start in positions[step][:_MAX_SAMPLES_PER_STEP]):
            lines.seek(start)
            rows.append(
                {name: _shorten(value, path.name) for name, value in present_row(json.loads(lines.readline())).items()}
            )
    num_all = sum(len(starts) for starts in positions.values())
    return ReportRollouts(rows, num_all, path.name, _images_of(rows, path.parent))


def _images_of(rows: list[JsonObject], folder: Path) -> dict[str, str]:
    """Load existing thumbnails that the samples name, as data URLs."""
    names = [name for row in rows for name in row.get(IMAGES) or ()]
    ours = {name for name in names if isinstance(name, str) and THUMBNAIL.fullmatch(name)}
    return {
        name: f"data:image/png;base64,{b64encode((folder / name).read_bytes()).decode()}"
        for name in sorted(ours)
        if (folder / name).is_file()
    }


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


def points(stage: Stage, name: str) -> list[tuple[int, float]]:
    """Return (step, value) pairs for a metric, without non-finite values."""
    return [(step, row[name]) for step, row in stage.metrics.items() if name in row and math.isfinite(row[name])]


def non_finite_steps(stage: Stage, name: str) -> list[int]:
    """Return the steps at which the metric is NaN or infinite."""
    return [step for step, row in stage.metrics.items() if name in row and not math.isfinite(row[name])]
