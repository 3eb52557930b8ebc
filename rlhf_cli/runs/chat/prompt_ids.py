"""Prompts of a conversation in token ids, in which earlier answers keep the ids that the model sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser


@dataclass(frozen=True, slots=True)
class KnownStart:
    """A start of the conversation's text, and its token ids."""

    text: str
    ids: list[int]


class PromptIds:
    """Token ids of prompts. If a prompt begins with a text whose ids are known, only the rest is tokenised.

    A template that renders earlier answers otherwise, as without their thoughts, gets new ids for the whole prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, plain: bool) -> None:
        """`plain` texts come from no template, so that they begin with the tokenizer's start of text."""
        self._tokenizer = tokenizer
        self._tokeniser = Tokeniser(tokenizer)
        self._plain = plain
        self._known: list[KnownStart] = []

    def of(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        self._known = [known for known in self._known if text.startswith(known.text)]
        if not self._known:
            return self._tokeniser.prompts([text], plain=self._plain)[0]
        start = max(self._known, key=lambda known: len(known.text))
        return start.ids + self._tokeniser.prompts([text[len(start.text) :]], plain=False)[0]

    def remember(self, prompt: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Keep the ids of a prompt with its response: with the response's last token, which may end it, and without."""
        for ids in (response_ids, response_ids[:-1]):
            text = text_of(self._tokenizer, ids, skip_special_tokens=False)
            self._known.append(KnownStart(prompt + text, [*prompt_ids, *ids]))
