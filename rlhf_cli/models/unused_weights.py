"""Weights that transformers ignores when it loads a checkpoint, such as layers for multi-token prediction.

They are copied unchanged into the saved model, so that it serves like its source. Training moves the other layers
away from them, so fewer of their predictions are accepted.
"""

import json
import logging
import re
from pathlib import Path

from safetensors.torch import save_file
from transformers import PreTrainedModel

from rlhf_cli.models.weight_files import TensorSource, folder_of, num_bytes, open_weights, plan_shards

ORIGIN = "weights_origin"
"""Attribute of a loaded model with the folder or Hub name of its weights."""
SHARD_BYTES = 2 << 30
"""Bytes of a file with unused weights, which are in memory together."""
_VISION = "model.visual."
"""Prefix of vision encoders, which text models of a vision-language family drop."""
INDEX = "model.safetensors.index.json"
_ORIGIN_FILE = "unused_weights.json"
"""File stored with a checkpoint that names the origin of the unused weights."""

logger = logging.getLogger(__name__)


def _unused_names(model: PreTrainedModel, weights: TensorSource) -> list[str]:
    """Return the names of tensors that loading ignores by rule of the model's class."""
    own = [*model.state_dict()]
    rules = [re.compile(rule) for rule in model._keys_to_ignore_on_load_unexpected or ()]
    # A rule names the layer after the last one, which a larger model of the same class would have.
    rules = [rule for rule in rules if not any(rule.search(name) for name in own)]
    return [
        name for name in weights.names() if not name.startswith(_VISION) and any(rule.search(name) for rule in rules)
    ]


def copy_unused_weights(model: PreTrainedModel, folder: Path) -> None:
    """Add the unused weights of the model's origin to a saved language model."""
    if (origin := _origin(model)) is None:
        return
    try:
        weights = open_weights(folder_of(origin))
    # huggingface_hub raises a ValueError for a path that does not exist; UsageError is one too.
    except (OSError, ValueError) as error:
        # The trained weights must not be lost with the origin.
        logger.warning("weights that transformers does not load (multi-token prediction) are not saved: %s", error)
        return
    names = _unused_names(model, weights)
    if names:
        _add(folder, weights, names)


def describe_unused_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write the name of the unused weights' origin, if the model's class may ignore any."""
    if (origin := _origin(model)) is not None:
        # Absolute, because checkpoints are read from other working directories.
        written = str(Path(origin).resolve()) if Path(origin).is_dir() else origin
        (folder / _ORIGIN_FILE).write_text(json.dumps({"model": written}) + "\n")


def restore_unused_weights(model: PreTrainedModel, described: Path, folder: Path) -> None:
    """Add the unused weights to an exported model, from the origin that a checkpoint names."""
    if (described / _ORIGIN_FILE).is_file():
        setattr(model, ORIGIN, json.loads((described / _ORIGIN_FILE).read_text())["model"])
        copy_unused_weights(model, folder)


def _origin(model: PreTrainedModel) -> str | None:
    """Return the origin of a language model whose class ignores weights by a rule."""
    # Most classes ignore nothing; reward models are not sampled from.
    ignores = model._keys_to_ignore_on_load_unexpected and model.can_generate()
    origin: str | None = getattr(model, ORIGIN, None)
    return origin if ignores else None


def _add(folder: Path, weights: TensorSource, names: list[str]) -> None:
    """Write further weight files, and the index of all files."""
    whole, index = folder / "model.safetensors", folder / INDEX
    saved = open_weights(folder)
    total = sum(num_bytes(saved, name) for name in saved.names()) + sum(num_bytes(weights, name) for name in names)
    if whole.is_file():
        # Next to a file of this name, the index would not be read.
        whole.rename(folder / "model-trained.safetensors")
        files = dict.fromkeys(saved.names(), "model-trained.safetensors")
    else:
        files = json.loads(index.read_text())["weight_map"]
    # A layer of experts may be larger than the memory that saving leaves free.
    for number, shard in enumerate(plan_shards(weights, names, max_bytes=SHARD_BYTES), 1):
        file = f"model-unused-{number:05d}.safetensors"
        save_file({name: weights.read(name).contiguous() for name in shard}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2) + "\n")
