"""Detects stop strings in sampled tokens, identically in both rollout engines.

EOS tokens are handled in the engines.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from rlhf_cli.config.model import ModelSource
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.models.tokenizers import load_tokenizer


class StopStrings:
    """Strings that end a response.

    Only the last `num_tokens` tokens are decoded, so that the cost per token does not grow with the response. Each
    token has at least one byte of text, so a stop string spans at most as many tokens as UTF-8 bytes.
    """

    def __init__(self, tokenizer: object, stop: Sequence[str]) -> None:
        self._decode = _decoder(tokenizer)
        self._stop = stop
        # One more, because SentencePiece decoders strip the space before the first token.
        self.num_tokens = max(len(text.encode()) for text in stop) + 1

    def end(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string.

        Pass the response, or at least the last `num_tokens` tokens. Special tokens count as text. A character counts
        once all bytes are present.
        """
        text = self._decode(list(token_ids[-self.num_tokens :]), skip_special_tokens=False)
        return any(stop in text for stop in self._stop)


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """Return the tokenizer's decode function."""
    # Calling the Rust tokenizer directly takes a tenth of the time of transformers' wrapper. This runs for every token.
    decode: Callable[..., str] = (
        tokenizer.backend_tokenizer.decode if tokenizer.is_fast else partial(text_of, tokenizer)
    )
    return decode


@lru_cache(maxsize=1)
def stop_strings(model_path: str, stop: tuple[str, ...], *, trust_remote_code: bool) -> StopStrings:
    """Create the detector with the model's tokenizer. Raises UsageError if the model has no tokenizer."""
    source = ModelSource(pretrain=model_path, trust_remote_code=trust_remote_code)
    return StopStrings(load_tokenizer(source), stop)
