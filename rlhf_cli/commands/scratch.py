"""`rlhf scratch`: a small untrained model and its tokenizer, made from a data set."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup


class ScratchConfig(BaseModel):
    """Settings of `rlhf scratch`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    new: ScratchConfigGroup
    architecture: ArchitectureConfig = ArchitectureConfig()


def scratch(config: ScratchConfig) -> None:
    """Make a small untrained model and tokenizer, to try things without downloading any."""
    from rlhf_cli.backends.output_lock import new_output

    path = Path(config.new.output)
    with new_output(path):
        said = _write_model(config, path)
    print(f"{path}: {said}")


def _write_model(config: ScratchConfig, path: Path) -> str:
    """Make the model at the path; return its size in words."""
    from rlhf_cli.data.sources import load_rows
    from rlhf_cli.models.scratch import new_model, save_new_model, texts_in, train_tokenizer

    rows = load_rows(config.new.dataset, split=config.new.dataset_split, probs=None, seed=config.new.seed)
    texts = (text for row in rows for text in texts_in(row))
    tokenizer = train_tokenizer(texts, vocab_size=config.new.vocab_size)
    model = new_model(config.architecture, tokenizer, seed=config.new.seed)
    save_new_model(model, tokenizer, path)
    return f"{model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens"
