"""Measured times of earlier runs on this machine, which scale the forecasts of later plans.

Each run appends one JSON line to `calibration.jsonl` in the cache folder, or to the file in `RLHF_CALIBRATION`: a key,
the time of its end, and pairs of planned and measured values. A plan is scaled by the median ratio of the newest runs
with its key.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rlhf_cli.environment import user_cache
from rlhf_cli.planning.planner import Plan

Pairs = Mapping[str, tuple[float, float]]
"""Planned and measured values by name."""
Run = Mapping[str, Any]
"""A line of the file."""
_NEWEST = 20
"""Number of runs that a plan is scaled by."""
_MAX_BYTES = 1 << 20
"""Size from which the older half of the file is dropped."""


def calibration_file() -> Path:
    """Return the path of the calibration file."""
    given = os.environ.get("RLHF_CALIBRATION")
    return Path(given) if given else user_cache("calibration.jsonl")


def seconds_of(phase: str) -> str:
    """Return the name of a phase's seconds in a comparison."""
    return f"{phase}, s"


def key_of(plan: Plan) -> dict[str, object]:
    """Return what runs must have in common: hardware, command, engine, dtype, and the model's size.

    Example: 135M and 270M parameters have `size` 8, the nearest power of ten; 494M, 1.5B and 3B have 9.
    """
    work = plan.work
    engine, hardware = work.engine, work.hardware
    shape = next(iter(work.roles.values())).shape if engine is None else engine.shape
    return {
        "hardware": f"{hardware.name}, {hardware.num_gpus} cores" if hardware.is_cpu else hardware.name,
        "command": work.config.command,
        "engine": None if engine is None else "vllm" if engine.is_vllm else "transformers",
        "dtype": work.config.setting("param_dtype"),
        "size": round(math.log10(shape.parameters)),
    }


def append_run(run: Mapping[str, object], file: Path) -> None:
    """Append a run, and drop the older half of a file that has become too large. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The file itself cannot be locked, because it is replaced when it is shortened.
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with file.open("ab", buffering=0) as lines:
            lines.write(json.dumps(run, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        if file.stat().st_size > _MAX_BYTES:
            _drop_older_half(file)


def _drop_older_half(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    shorter = file.with_suffix(".tmp")
    shorter.write_bytes(b"".join(lines[len(lines) // 2 :]))
    os.replace(shorter, file)


def read_runs(file: Path) -> list[Run]:
    """Return all runs, oldest first; none if the file cannot be read. Damaged lines are skipped."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    return list(_decoded(lines))


def _decoded(lines: Sequence[bytes]) -> Iterator[Run]:
    for line in lines:
        try:
            run = json.loads(line)
        except ValueError:
            continue
        if isinstance(run, dict) and isinstance(run.get("values"), dict):
            yield run


def calibrated(plan: Plan, runs: Sequence[Run]) -> Plan:
    """Scale each phase of a plan by the median of measured to planned seconds of matching runs, if there are any."""
    key = key_of(plan)
    same = [run["values"] for run in runs if {name: run.get(name) for name in key} == key][-_NEWEST:]
    times = dict(plan.times)
    for phase, time in plan.times.items():
        ratios = [measured / planned for planned, measured in _pairs(same, seconds_of(phase))]
        if ratios:
            times[phase] = replace(time, seconds=time.seconds * median(ratios))
    return replace(plan, times=times, num_calibrating=len(same))


def _pairs(runs: Sequence[Run], name: str) -> Iterator[tuple[float, float]]:
    for values in runs:
        match values.get(name):
            case [float() | int() as planned, float() | int() as measured] if planned > 0 and measured > 0:
                yield planned, measured
