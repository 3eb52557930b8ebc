"""Two-turn episodes for end-to-end runs with an untrained model."""

import json
import shutil
from pathlib import Path

ENDS = range(100, 240)
"""End-of-turn tokens: about half of the vocabulary, so that an untrained model ends its turns."""
GAME = """
class Environment:
    def reset(self, **row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return f"{len(text)} letters", float(len(text) % 3), self.turn == 2
"""


def with_many_ends(model: Path) -> Path:
    """Return a copy of the model with many end-of-turn tokens."""
    copy = model.with_name(f"{model.name}_with_many_ends")
    if not copy.exists():
        shutil.copytree(model, copy)
        file = copy / "generation_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *ENDS]}))
    return copy


def game_file(folder: Path) -> Path:
    """Return the file of an environment that replies twice, with rewards that an untrained model gets."""
    file = folder / "two_turns.py"
    file.write_text(GAME)
    return file
