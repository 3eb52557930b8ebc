"""Episodes without a model: tokenizer of a family, environment, and written turns."""

import json
from pathlib import Path

from model_templates import FAMILIES

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.options import build_config
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.episode_preview import PlayedEpisode, Rehearsal


def save_model_without_weights(folder: Path) -> str:
    """Write a folder with Qwen 2.5's template and without loadable weights. Returns its path."""
    tokenizer = FAMILIES["Qwen 2.5"].tokenizer()
    tokenizer.save_pretrained(folder)
    described = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(described | {"eos_token_id": tokenizer.eos_token_id}))
    (folder / "model.safetensors").touch()
    return str(folder)


def rehearsal_of(model: str, environment: str, dataset: str = "tasks.jsonl", **settings) -> Rehearsal:
    """Return a playable episode with the first row of a dataset."""
    given = {"for": "ppo", "dataset": dataset, "pretrain": model, "environment": environment, **settings}
    (preview,) = inspect_data(build_config(DataCommandConfig, {"max_len": 4096, "max_new_tokens": 256, **given}))
    assert preview.rehearsal is not None
    return preview.rehearsal


def play(rehearsal: Rehearsal, *turns: str) -> PlayedEpisode:
    """Play the episode with these turns."""
    written = iter(turns)
    return rehearsal.play(lambda token_ids, start: next(written, None))


def texts(played: PlayedEpisode) -> list[tuple[str, str]]:
    """Return the name and text of each part of an episode."""
    return [(part.name, "".join(piece.text for piece in part.pieces)) for part in played.example.parts]
