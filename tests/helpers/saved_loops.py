"""Online loop state after a round trip through checkpoint files."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.runs.online.group_files import load_state, save_groups
from rlhf_cli.trainers.online.prompt_source import prompt_at
from rlhf_cli.trainers.online.state import LoopState, OnlineSettings

STATE = "loop.json"


def write_state(folder: Path, state: LoopState) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).write_text(json.dumps(state.plain()))
    save_groups(folder, state)


def read_state(folder: Path, prompts: Sequence[Prompt], settings: OnlineSettings) -> LoopState:
    plain = json.loads((folder / STATE).read_text())
    checkpoint = Checkpoint(folder, plain["iteration"], {"loop": plain})
    return load_state(checkpoint, lambda place: prompt_at(place, prompts, settings))


def through_files(state: LoopState, folder: Path, prompts: Sequence[Prompt], settings: OnlineSettings) -> LoopState:
    """Return the state as loaded from a checkpoint."""
    write_state(folder, state)
    return read_state(folder, prompts, settings)
