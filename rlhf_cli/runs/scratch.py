"""Implementation of `rlhf scratch`: creates a small untrained model with a tokenizer."""

from pathlib import Path

from rlhf_cli.backends.process.output_lock import new_output
from rlhf_cli.commands.scratch import ScratchConfig
from rlhf_cli.data.formats.tools import TOOLS_COLUMN
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.models.scratch import (
    new_model,
    new_processor,
    new_vision_model,
    save_new_model,
    texts_in,
    train_tokenizer,
)


def run_scratch(config: ScratchConfig) -> str:
    """Write the model to `output`. Returns path and size in one line."""
    path = Path(config.new.output)
    with new_output(path):
        size = _write_model(config, path)
    return f"{path}: {size}"


def _write_model(config: ScratchConfig, path: Path) -> str:
    rows = load_rows(config.new.dataset, split=config.new.dataset_split, probs=None, seed=config.new.seed)
    texts = (text for row in rows for text in texts_in(row))
    takes_images = config.tower.image_size > 0
    takes_tools = not takes_images and any(row.get(TOOLS_COLUMN) for row in rows)
    tokenizer = train_tokenizer(
        texts, vocab_size=config.new.vocab_size, takes_images=takes_images, takes_tools=takes_tools
    )
    if takes_images:
        model = new_vision_model(config.architecture, config.tower, tokenizer, seed=config.new.seed)
        save_new_model(model, new_processor(config.tower, tokenizer), path)
    else:
        model = new_model(config.architecture, tokenizer, seed=config.new.seed)
        save_new_model(model, tokenizer, path)
    return f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens"


def scratch(config: ScratchConfig) -> None:
    """Run `rlhf scratch`."""
    print(run_scratch(config))
