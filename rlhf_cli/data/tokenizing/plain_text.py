"""Untrusted text in template text: its control tokens remain plain characters, so that it cannot forge a turn.

A control token in such text is split by a private-use Unicode character, which the template keeps. The pieces are
tokenized separately. Text without control tokens is tokenized together with the surrounding text.
"""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.tokenizer import Tokeniser

CUT = "\ue7f3"
"""Split marker, which is first removed from untrusted text."""


class PlainText:
    """Guards untrusted text, and tokenizes text that contains it.

    Control tokens are the tokenizer's special tokens, other added tokens in `marks`, such as `<tool_call>`, and added
    tokens beyond the model's `vocab_size` embeddings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: str, *, vocab_size: int) -> None:
        self._tokeniser = Tokeniser(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        found = {
            token.content: number
            for number, token in added
            if token.content.strip() and (token.special or token.content in marks or number >= vocab_size)
        }
        self._numbers = frozenset(found.values())
        # Tokens of one character cannot be split.
        longest_first = sorted((text for text in found if len(text) > 1), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def guarded(self, text: str, *, behind: str = "") -> str:
        """Return `behind` + `text`, with control tokens split if any part is in `text`, and without unpaired
        surrogates.
        """
        joined = behind + _whole_characters(text).replace(CUT, "")
        # Control tokens that lie only in the preceding text are legitimate.
        return self._pattern.sub(lambda found: found[0] if found.end() <= len(behind) else _cut(found[0]), joined)

    def cut_everywhere(self, text: str) -> str:
        """Return the guarded text split after each character, so that no two form a control token."""
        return CUT.join(self.guarded(text).replace(CUT, ""))

    def ids(self, text: str) -> list[int]:
        """Tokenize text with split markers."""
        pieces = [piece for piece in text.split(CUT) if piece]
        return [number for ids in self._tokeniser.prompts(pieces, plain=False) for number in ids]

    def num_controls(self, ids: Sequence[int]) -> int:
        """Return the number of control tokens."""
        return sum(number in self._numbers for number in ids)


def _cut(token: str) -> str:
    return token[:1] + CUT + token[1:]


def _whole_characters(text: str) -> str:
    """Replace unpaired surrogates, which have no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # UTF-16 represents unpaired surrogates, which decoding then replaces.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
