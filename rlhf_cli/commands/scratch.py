"""`rlhf scratch`: a small untrained model and its tokenizer, made from a data set."""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.scratch import ArchitectureConfig, ScratchConfigGroup


class ScratchConfig(BaseModel):
    """Settings of `rlhf scratch`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    new: ScratchConfigGroup
    architecture: ArchitectureConfig = ArchitectureConfig()


def scratch(config: ScratchConfig) -> None:
    """Make a small untrained model and tokenizer, to try things without downloading any."""
    from pathlib import Path

    from rlhf_cli.data.sources import load_rows
    from rlhf_cli.errors import UsageError
    from rlhf_cli.models.scratch import new_model, save_new_model, texts_in, train_tokenizer

    path = Path(config.new.output)
    if path.exists():
        raise UsageError(f"--output {path} exists already; choose another folder")
    rows = load_rows(config.new.dataset, split=config.new.dataset_split, probs=None, seed=config.new.seed)
    texts = (text for row in rows for text in texts_in(row))
    tokenizer = train_tokenizer(texts, vocab_size=config.new.vocab_size)
    model = new_model(config.architecture, tokenizer, seed=config.new.seed)
    save_new_model(model, tokenizer, path)
    print(f"{path}: {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")
