"""Fingerprints for tokenizers, chat templates and configurations, independent of file location.

weight_files computes fingerprints for weights.
"""

import hashlib
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_cli.models.weight_files import folder_of

_OF_A_CALL = ("truncation", "padding")
"""Tokenizer JSON entries that calls modify."""
_OF_A_FILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Configuration entries that do not affect outputs in the configured dtype."""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that determines tokenization."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Slow tokenizers are plain Python and have no serialized backend.
    if backend is None:
        model: object = sorted(tokenizer.get_vocab().items())
    else:
        model = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _OF_A_CALL}
    # Include the class: the same files can be loaded by a slow and a fast tokenizer with different results.
    return _hash([type(tokenizer).__name__, model, dict(tokenizer.special_tokens_map)])


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the chat template, or a dict of named templates."""
    return _hash(tokenizer.chat_template)


def configuration_fingerprint(path: str) -> str:
    """Hash the config.json in a folder or on the Hub.

    Equal weights compute different outputs with, for example, other RoPE frequencies.
    """
    written = json.loads((Path(folder_of(path)) / "config.json").read_bytes())
    return _hash({key: value for key, value in written.items() if key not in _OF_A_FILE})


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
