"""Checks a tokenizer against the tokenizer.json that its model was trained with.

transformers rebuilds some tokenizers by class and uses only the vocabulary from the file: a byte-level tokenizer.json
with `LlamaTokenizer` then loses all spaces.
"""

import logging
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rlhf_cli.errors import UsageError

logger = logging.getLogger(__name__)
_NUM_COMPARED = 32
"""Number of initial texts to compare."""


class SavedTokenizer:
    """Tokenizer from tokenizer.json, for comparing a run's first texts."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._saved = Tokenizer.from_file(path)
        # tokenizer.json may configure truncation and padding, which training does not use.
        self._saved.no_truncation()
        self._saved.no_padding()
        added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._num_left = _NUM_COMPARED

    @classmethod
    def of(cls, tokenizer: Any) -> "SavedTokenizer | None":
        """Return the saved tokenizer if transformers rebuilds it by class; None for others, which use the file
        directly.
        """
        # PreTrainedTokenizerFast uses the file as it is.
        if not tokenizer.is_fast or type(tokenizer) is PreTrainedTokenizerFast:
            return None
        path = _file_of(tokenizer.name_or_path)
        return None if path is None else cls(tokenizer, path)

    def compare(self, texts: Iterable[str]) -> None:
        """Compare the tokens of the first texts, and warn once if they differ.

        Added tokens may be missing in the file, so only the text between them is compared.

        Raises:
            UsageError: the rebuilt tokenizer loses text that the file keeps.
        """
        chosen = list(islice(texts, self._num_left))
        self._num_left -= len(chosen)
        for piece in (piece for text in chosen for piece in self._added.split(text) if piece.strip()):
            own = self._tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids
            saved = self._saved.encode(piece, add_special_tokens=False).ids
            if own != saved:
                self._report(piece, own, saved)
                return

    def _report(self, piece: str, own: list[int], saved: list[int]) -> None:
        # One report is enough, as the rest would differ in the same way.
        self._num_left = 0
        read = self._tokenizer.decode(own, clean_up_tokenization_spaces=False)
        kept = self._saved.decode(saved, skip_special_tokens=False)
        place = next((n for n, (a, b) in enumerate(zip(read, piece, strict=False)) if a != b), 0)
        start = max(0, place - 20)
        name = type(self._tokenizer).__name__
        cure = (
            f'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, or, if {name} is right, save '
            "the tokenizer anew with its save_pretrained"
        )
        # Only lost text is an error; other tokens for the same text may be intended.
        if read.strip() != piece.strip() and kept.strip() == piece.strip():
            raise UsageError(
                f"the tokenizer reads {piece[start : start + 60]!r} as {read[start : start + 60]!r}: transformers "
                f"builds it as {name}, which is not what {self._path} has; {cure}"
            )
        logger.warning(
            "The tokenizer gives %d tokens for %r and %s gives %d others: transformers builds it as %s; %s.",
            len(own),
            piece[:60],
            self._path,
            len(saved),
            name,
            cure,
        )


def _file_of(name: str) -> str | None:
    """Return the tokenizer.json of a folder or a cached Hub model."""
    local = Path(name) / "tokenizer.json"
    if not name or local.is_file():
        return str(local) if name else None
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # a folder is not a valid Hub name
        return None
    return cached if isinstance(cached, str) else None
