"""Made-up run directories for tests of `rlhf view`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from rlhf_cli.tracking.sinks import METRICS_FILE, RUN_FILE, SAMPLES_FILE, SETTINGS_FILE


def sample(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row of samples.jsonl: groups of 2, iterations of 4, rewards 0 and 1 in turn, lengths 1, 2, 3, ..."""
    group, place = divmod(number, 2)
    row = {
        "step": number // 4 + 1,
        "id": f"data.jsonl:{group}/{group}.{place}@0",
        "source": "data.jsonl",
        "row": group,
        "group": group,
        "sample": place,
        "weight_version": 0,
        "prompt": f"question {group}",
        "response": f"answer {number}",
        "label": str(group),
        "reward": float(number % 2),
        "verdict": "correct" if number % 2 else "wrong",
        "length": number + 1,
        "finish_reason": "stop",
        "advantage": float(number % 2) - 0.5,
    }
    return row | changes


def write(path: Path, rows: Iterable[dict[str, Any]], mode: str = "a") -> None:
    """Append rows to a JSON lines file."""
    with path.open(mode, encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_run(path: Path, *, samples: int = 12, steps: int = 3, outcome: str = "finished", lr: float = 0.1) -> Path:
    """Write a run directory."""
    path.mkdir(parents=True)
    facts = {"command": "grpo", "unit": "iteration", "total_steps": steps, "facts": {}, "outcome": outcome}
    (path / RUN_FILE).write_text(json.dumps(facts))
    (path / SETTINGS_FILE).write_text(f"# Model\npretrain: tiny\n\n# Optimizer\nactor_learning_rate: {lr}\n")
    metrics = ({"step": step, "reward": step / 4, "time/train": 1.0, "time/step": 2.0} for step in range(1, steps + 1))
    write(path / METRICS_FILE, metrics, "w")
    write(path / SAMPLES_FILE, map(sample, range(samples)), "w")
    return path


def exported(report: Path) -> Any:
    """Return the data in a report.html."""
    page = report.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert "<" not in text  # no parser can end the element or start a comment
    return json.loads(text)


def add_image(path: Path) -> str:
    """Write a thumbnail into a run directory and return its name in samples."""
    (path / "sample_images").mkdir()
    Image.new("RGB", (4, 4), "red").save(path / "sample_images" / "red.png")
    return "sample_images/red.png"
