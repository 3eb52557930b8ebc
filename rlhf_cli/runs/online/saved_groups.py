"""Groups of responses that a checkpoint keeps for the iteration after it (`--dynamic_filtering`)."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.groups import PromptGroup

FILE = "surplus.jsonl.gz"


def save_surplus(folder: Path, groups: Sequence[PromptGroup]) -> None:
    """Write the groups into a checkpoint's folder, to the last bit."""
    with gzip.open(folder / FILE, "wt", compresslevel=1, encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(group)) + "\n" for group in groups)


def load_surplus(folder: Path) -> list[PromptGroup]:
    """Return the groups of a checkpoint."""
    with gzip.open(folder / FILE, "rt", encoding="utf-8") as file:
        return [_group(**json.loads(line)) for line in file]


def _group(place: int, prompt: dict, generations: list[dict], questions: list[dict], scores: list[dict]) -> PromptGroup:
    return PromptGroup(
        place,
        Prompt(**prompt),
        [Generation(**row) for row in generations],
        [ScoreRequest(**row) for row in questions],
        [Score(**row) for row in scores],
    )
