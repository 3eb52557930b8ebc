"""Decides by tokens whether a response's text holds a stop string; the same for both rollout engines.

Leaves out end-of-sequence tokens, which engines compare themselves.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from rlhf_cli.config.model import TokenizerSource
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.models.tokenizers import load_tokenizer


class StopStrings:
    """Texts that end a response.

    Looks at the last tokens alone, so that a token costs the same however long the response is: a token has a byte of
    text at least, so that no stop string spans more tokens than it has bytes in UTF-8.
    """

    def __init__(self, tokenizer: object, stop: Sequence[str]) -> None:
        self._decode = _decoder(tokenizer)
        self._stop = stop
        # one more, since decoders of SentencePiece models drop a blank before the first token they are given
        self.num_tokens = max(len(text.encode()) for text in stop) + 1

    def end(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completed a stop string; `token_ids` are a response's, or its last
        `num_tokens`.

        Special tokens count as their text. A character is there when all of its bytes are.
        """
        text = self._decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(stop in text for stop in self._stop)


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """Return the function that decodes: of the library behind a fast tokenizer, which takes a tenth of the time."""
    decode: Callable[..., str] = (
        tokenizer.backend_tokenizer.decode if tokenizer.is_fast else partial(text_of, tokenizer)
    )
    return decode


@lru_cache(maxsize=1)
def stop_strings(model_path: str, stop: tuple[str, ...], *, trust_remote_code: bool) -> StopStrings:
    """Return the stop strings in tokens of that model. Raise UsageError if it has no tokenizer."""
    source = TokenizerSource(pretrain=model_path, trust_remote_code=trust_remote_code)
    return StopStrings(load_tokenizer(source), stop)
