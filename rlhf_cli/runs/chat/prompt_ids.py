"""Token IDs of chat prompts. Earlier answers keep their sampled token IDs."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser


@dataclass(frozen=True, slots=True)
class _KnownStart:
    """Known prefix text with its token IDs."""

    text: str
    ids: list[int]


class PromptIds:
    """Token IDs of prompts. If a prompt starts with known text, only the rest is tokenized.

    A template that changes earlier answers, such as by removing reasoning, requires tokenizing the whole prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, plain: bool) -> None:
        """`plain` prompts do not use a template, so the tokenizer adds the BOS token."""
        self._tokenizer = tokenizer
        self._tokeniser = Tokeniser(tokenizer)
        self._plain = plain
        self._known: list[_KnownStart] = []

    def of(self, text: str) -> list[int]:
        """Return a prompt's token IDs."""
        # Retokenizing an answer may give different IDs than the model sampled, so keep the sampled ones.
        self._known = [known for known in self._known if text.startswith(known.text)]
        if not self._known:
            return self._tokeniser.prompts([text], plain=self._plain)[0]
        # The longest known prefix keeps the most sampled IDs.
        start = max(self._known, key=lambda known: len(known.text))
        return start.ids + self._tokeniser.prompts([text[len(start.text) :]], plain=False)[0]

    def remember(self, prompt: str, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        """Store a prompt with its response, with and without the last response token, which may be the end token."""
        # A template may write its own end token, or the same text as the sampled one.
        for ids in (response_ids, response_ids[:-1]):
            text = text_of(self._tokenizer, ids, skip_special_tokens=False)
            self._known.append(_KnownStart(prompt + text, [*prompt_ids, *ids]))
