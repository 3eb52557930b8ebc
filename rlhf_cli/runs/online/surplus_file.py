"""Groups of responses that a checkpoint keeps for the iteration after it (`--dynamic_filtering`)."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Episode, Generation
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.trainers.online.groups import PromptGroup

FILE = "surplus.jsonl.gz"


def save_surplus(folder: Path, groups: Sequence[PromptGroup]) -> None:
    """Write the groups into a checkpoint's folder, to the last bit. Their prompts, with pictures, are the data's."""
    with gzip.open(folder / FILE, "wt", compresslevel=1, encoding="utf-8") as file:
        file.writelines(json.dumps(_plain(group)) + "\n" for group in groups)


def load_surplus(folder: Path, prompt_at: Callable[[int], Prompt]) -> list[PromptGroup]:
    """Return the groups of a checkpoint. `prompt_at` gives the prompt at a place in the order of the run."""
    with gzip.open(folder / FILE, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [_group(row, prompt_at(row["place"])) for row in rows]


def _plain(group: PromptGroup) -> dict[str, object]:
    return {
        "place": group.place,
        "generations": [asdict(generation) for generation in group.generations],
        "score_requests": [asdict(replace(request, pictures=())) for request in group.score_requests],
        "scores": [asdict(score) for score in group.scores],
    }


def _group(row: Mapping[str, Any], prompt: Prompt) -> PromptGroup:
    pictures = tuple(placed.picture for placed in prompt.pictures)
    return PromptGroup(
        row["place"],
        prompt,
        [_generation(plain) for plain in row["generations"]],
        [_score_request(plain | {"pictures": pictures}) for plain in row["score_requests"]],
        [Score(**score) for score in row["scores"]],
    )


def _generation(plain: Mapping[str, Any]) -> Generation:
    episode = None if plain.get("episode") is None else Episode.of(plain["episode"])
    return Generation(**{**plain, "episode": episode})


def _score_request(plain: Mapping[str, Any]) -> ScoreRequest:
    return ScoreRequest(**{**plain, "messages": tuple(plain.get("messages", ()))})
