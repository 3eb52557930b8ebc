"""Whether a tokenizer gives the tokens of the file tokenizer.json that its model was trained with.

transformers builds some tokenizers anew by their class and takes only the vocabulary from the file: a byte-level file
under `LlamaTokenizer` then loses every space.
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
NUM_COMPARED = 32
"""Texts at the start that are compared."""


class SavedTokenizer:
    """The tokenizer of tokenizer.json, with which the first texts of a run are compared."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._saved = Tokenizer.from_file(path)
        self._saved.no_truncation()
        self._saved.no_padding()
        added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._num_left = NUM_COMPARED

    @classmethod
    def of(cls, tokenizer: Any) -> "SavedTokenizer | None":
        """Return the file of a tokenizer that its class builds anew; None for others, which are the file itself."""
        if not tokenizer.is_fast or type(tokenizer) is PreTrainedTokenizerFast:
            return None
        path = _file_of(tokenizer.name_or_path)
        return None if path is None else cls(tokenizer, path)

    def compare(self, texts: Iterable[str]) -> None:
        """Compare the tokens of the first texts; warn once if they differ.

        Tokens that were added later have no place in the file, so the text between them is compared.

        Raises:
            UsageError: the class loses text that the file keeps.
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
    """Return tokenizer.json of a folder or of a model of the Hub that is in the cache."""
    local = Path(name) / "tokenizer.json"
    if not name or local.is_file():
        return str(local) if name else None
    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # a folder, which is no name on the Hub
        return None
    return cached if isinstance(cached, str) else None
