"""Load tokenizers, with the configured chat template."""

import json
from pathlib import Path

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from rlhf_cli.config.model import ModelSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, naming_the_model, resolve_model_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that identify a tokenizer folder. Without any, transformers creates an empty tokenizer."""


def load_tokenizer(config: ModelSource) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the configured chat template if set.

    No padding token is added: training never pads, and a padding token equal to the end token would mask it.
    """
    return read_tokenizer(_tokenizer_path(config.pretrain), config)


def read_tokenizer(path: str, config: ModelSource) -> PreTrainedTokenizerBase:
    """Load a tokenizer like `load_tokenizer`, from this folder or Hub name instead of the configured model."""
    if Path(path).is_dir() and not _has_tokenizer(Path(path)):
        raise UsageError(f"pretrain {path!r} has no tokenizer (tokenizer.json)")
    with naming_the_model(path, "the tokenizer"):
        # With mistral-common installed (a vLLM dependency), transformers would use tekken.json, which has no chat
        # template.
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, mistral_format=False
        )
    # Only added tokens: transformers created an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise UsageError(
            f"pretrain {path!r}: the tokenizer has no vocabulary; a file such as tokenizer.json is missing"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(Path(path))
    if config.tokenizer_chat_template is not None:
        tokenizer.chat_template = _chat_template(config.tokenizer_chat_template)
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """Return the chat template that older vision-language models store only for the processor, or None."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    template: str | None = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    return template


def _tokenizer_path(pretrain: str) -> str:
    """Return the tokenizer location: the model or adapter folder, or the base model of a plain PEFT adapter."""
    adapter = adapter_folder(pretrain)
    if adapter is None:
        return resolve_model_path(pretrain)
    base = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    # Prefer the adapter's tokenizer: training may have changed its chat template or padding token.
    return str(adapter) if _has_tokenizer(adapter) or not base else resolve_model_path(base)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _chat_template(source: str) -> str:
    if "{" in source:
        return source
    path = Path(source).expanduser()
    if not path.is_file():
        raise UsageError(f"tokenizer_chat_template {source!r} is neither a file nor a Jinja template")
    return path.read_text(encoding="utf-8")
