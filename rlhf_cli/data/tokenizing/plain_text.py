"""Text of others inside a template's text: its control tokens stay characters, so that it can forge no turn.

A control token in such a text is cut in two by a character of Unicode's private use, which survives the template. The
pieces are tokenised apart. Text without control tokens is tokenised in one piece with the text around it.
"""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.tokenizer import Tokeniser

CUT = "\ue7f3"
"""Stands where a text is cut; it is removed from texts of others before."""


class PlainText:
    """Guards texts of others, and tokenises text with them in it.

    Control tokens are the special tokens of a tokenizer, other added tokens that stand in `marks`, as `<tool_call>`,
    and added tokens beyond the `vocab_size` embeddings of the model.
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
        longest_first = sorted((text for text in found if len(text) > 1), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def guarded(self, text: str, *, behind: str = "") -> str:
        """Return `behind` and the text, with a cut in each control token that the text has a part of, and without half
        characters.
        """
        joined = behind + _whole_characters(text).replace(CUT, "")
        return self._pattern.sub(lambda found: found[0] if found.end() <= len(behind) else _cut(found[0]), joined)

    def cut_everywhere(self, text: str) -> str:
        """Return the guarded text with a cut behind every character: no two make a control token then."""
        return CUT.join(self.guarded(text).replace(CUT, ""))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text with cuts."""
        pieces = [piece for piece in text.split(CUT) if piece]
        return [number for ids in self._tokeniser.prompts(pieces, plain=False) for number in ids]

    def num_controls(self, ids: Sequence[int]) -> int:
        """Return the number of control tokens among tokens."""
        return sum(number in self._numbers for number in ids)


def _cut(token: str) -> str:
    return token[:1] + CUT + token[1:]


def _whole_characters(text: str) -> str:
    """Return the text with a mark of replacement for each half of a character, which has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
