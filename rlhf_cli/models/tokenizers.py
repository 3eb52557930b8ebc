"""Tokenizers of models, with the chat template of the settings."""

import json
from pathlib import Path

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from rlhf_cli.config.model import TokenizerSource
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import ADAPTER_FILE, adapter_folder, naming_the_model, resolve_model_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""At least one is in a folder with a tokenizer; without any, transformers makes up an empty one."""


def load_tokenizer(config: TokenizerSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, with the chat template of the settings if there is one.

    No padding token is made up: training never pads, and one equal to the end of sequence would hide that token.
    """
    return read_tokenizer(_tokenizer_path(config.pretrain), config)


def read_tokenizer(path: str, config: TokenizerSource) -> PreTrainedTokenizerBase:
    """Return the tokenizer as `load_tokenizer` does, from that folder or Hub name whatever model the settings name."""
    if Path(path).is_dir() and not _has_tokenizer(Path(path)):
        raise UsageError(f"pretrain {path!r} has no tokenizer (tokenizer.json)")
    with naming_the_model(path, "the tokenizer"):
        # Where vLLM is installed, transformers would take Mistral's own tokenizer (tekken.json), which has no template.
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=config.trust_remote_code, mistral_format=False
        )
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes up an empty one
        raise UsageError(
            f"pretrain {path!r}: the tokenizer has no vocabulary: a file such as tokenizer.json is missing"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(Path(path))
    if config.tokenizer_chat_template is not None:
        tokenizer.chat_template = _chat_template(config.tokenizer_chat_template)
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """Return the template that older vision-language models keep for their processor alone; None without one."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    template: str | None = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    return template


def _tokenizer_path(pretrain: str) -> str:
    """Return the tokenizer's place: with the model or adapter, or with the base of an adapter as PEFT alone saves
    it."""
    adapter = adapter_folder(pretrain)
    if adapter is None:
        return resolve_model_path(pretrain)
    base = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
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
