"""Hashes that distinguish tokenizers, chat templates and configurations, wherever their files are.

Weights have theirs in weight_files.
"""

import hashlib
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_cli.models.weight_files import folder_of

OF_A_CALL = ("truncation", "padding")
"""Parts of a tokenizer's JSON that calls change."""
OF_A_FILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that do not change the model's outputs in the type of the settings."""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides which tokens a text has."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        model: object = sorted(tokenizer.get_vocab().items())
    else:
        model = {key: value for key, value in json.loads(backend.to_str()).items() if key not in OF_A_CALL}
    return _hash([type(tokenizer).__name__, model, dict(tokenizer.special_tokens_map)])


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the chat template, or of several by their names."""
    return _hash(tokenizer.chat_template)


def configuration_fingerprint(path: str) -> str:
    """Return a hash of the config.json in a folder or on the Hub.

    The same weights compute other things with other rotary frequencies.
    """
    written = json.loads((Path(folder_of(path)) / "config.json").read_bytes())
    return _hash({key: value for key, value in written.items() if key not in OF_A_FILE})


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
