"""Tokenizes text, and converts character spans to token spans.

A text is tokenized once as a whole; token offsets determine the tokens of a span.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tokenizers import Encoding
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rlhf_cli.data.formats.marks import runs_of
from rlhf_cli.data.pictures.sources import StandingPicture
from rlhf_cli.data.templates.chat_template import Rendered
from rlhf_cli.data.templates.rendering import Pieces
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.turn_spans import Span
from rlhf_cli.data.tokenizing.token_bytes import TokenBytes
from rlhf_cli.errors import UsageError


def check_token_ids(
    largest: int, where: str, tokenizer: PreTrainedTokenizerBase, architecture: PretrainedConfig, *, pretrain: str
) -> None:
    """Raise UsageError if the largest token of the text at `where` has no embedding: the model was not resized for new
    tokens.

    A tokenizer may have more tokens than the model as long as no text contains them.
    """
    size = architecture.get_text_config().vocab_size
    if largest >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise UsageError(
            f"{where}: the token {token!r} has the id {largest:,}, and pretrain {pretrain!r} has "
            f"{size:,} embeddings: it was not resized (resize_token_embeddings) when its tokenizer got new tokens"
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token IDs of a sequence; `spans` are the trained ranges, `weights` their loss weights, () if all are 1.

    - `merged`: leading white space of an assistant's text shares a token with the template, which is not trained.
    - `num_unthought`: turns with reasoning removed by the template.
    - `num_inlined`: turns with reasoning moved to the content.
    - `pictures`: images in order. Their tokens are never trained.
    - `left_out`: ranges excluded by loss markers, removed from spans by `without_left_out`.
    """

    ids: list[int]
    spans: list[Span]
    merged: bool = False
    num_unthought: int = 0
    num_inlined: int = 0
    pictures: tuple[StandingPicture, ...] = ()
    left_out: tuple[Span, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return sum(stop - start for start, stop in self.spans)

    def cut(self, max_len: int) -> "Tokens":
        """Truncate to `max_len` tokens, without adding an end token.

        An image with truncated tokens is removed entirely.
        """
        # A partial image has no features for some of its tokens.
        stop = next((picture.start for picture in self.pictures if picture.start < max_len < picture.stop), max_len)
        pictures = tuple(picture for picture in self.pictures if picture.stop <= stop)
        spans = [(start, min(end, stop)) for start, end in self.spans if start < stop]
        return replace(self, ids=self.ids[:stop], spans=spans, pictures=pictures, weights=self.weights[: len(spans)])

    def without_left_out(self) -> "Tokens":
        """Exclude tokens from the loss as set by loss markers."""
        if not self.left_out:
            return self
        out = {place for start, stop in self.left_out for place in range(start, stop)}
        spans: list[Span] = []
        weights: list[float] = []
        for number, (start, stop) in enumerate(self.spans):
            runs = runs_of([place not in out for place in range(start, stop)])
            spans += [(start + begin, start + end) for begin, end in runs]
            weights += self.weights[number : number + 1] * len(runs)
        return replace(self, spans=spans, weights=tuple(weights))

    def all_trained(self) -> "Tokens":
        """Train all tokens except the first and images, if any token was trained."""
        if not self.spans:
            return replace(self, merged=False)
        # Bounds alternate between starts and ends of ranges without images.
        bounds = [1, *(bound for p in self.pictures for bound in (max(p.start, 1), p.stop)), len(self.ids)]
        spans = [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
        return replace(self, spans=spans, merged=False)


def require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UsageError for slow tokenizers, which do not report token offsets."""
    if not tokenizer.is_fast:
        raise UsageError(
            f"pretrain {tokenizer.name_or_path!r}: its tokenizer {type(tokenizer).__name__} is a slow one, which gives "
            "no offsets of tokens, so that the assistant's tokens cannot be told from others: training on data needs "
            "a tokenizer.json (sampling and reinforcement learning do not)"
        )


class Tokeniser:
    """A tokenizer, with the tokens that it adds before and after plain text.

    Slow tokenizers support prompts only; examples require offsets from fast tokenizers (`require_offsets`). Raises
    UsageError for a tokenizer without an end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise UsageError("the tokenizer has no end-of-sequence token (eos_token): a model could not learn to stop")
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self._start = self._start_of_text()

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return TokenBytes.of(self._tokenizer.backend_tokenizer)

    def _start_of_text(self) -> list[int]:
        """Return the tokens that the tokenizer adds before a text: the BOS token, or nothing.

        These calls also disable truncation and padding configured in tokenizer.json.
        """
        # The letter must have a token, since BOS is recognized by what precedes it.
        letter = next(filter(self._ids, self._letters()), "")
        text, whole = self._ids(letter), self._tokenizer(letter, add_special_tokens=True)["input_ids"]
        places = (place for place in range(len(whole)) if whole[place : place + len(text)] == text)
        return whole[: next(places, 0)]

    def _letters(self) -> Iterator[str]:
        """Yield candidate texts: a DNA or digit vocabulary may have no token for the first one."""
        yield "a"
        special = set(self._tokenizer.all_special_ids)
        yield from (self._tokenizer.decode([token]) for token in range(len(self._tokenizer)) if token not in special)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def writes(self, text: str) -> bool:
        """Return whether the text's tokens decode to it."""
        decoded = self._tokenizer.decode(self._ids(text), clean_up_tokenization_spaces=False)
        return _comparable(decoded) == _comparable(text)

    def _encodings(self, texts: list[str], *, with_offsets: bool) -> list[Encoding]:
        """Encode with the backend: calling the tokenizer converts all encodings to lists, a sixth of the total time for
        sft.
        """
        backend = self._tokenizer.backend_tokenizer
        # `encode_batch_fast` omits offsets, which prompts do not need.
        encode = backend.encode_batch if with_offsets else backend.encode_batch_fast
        return encode(texts, add_special_tokens=False) if texts else []

    def prompts(self, texts: list[str], *, plain: bool) -> list[list[int]]:
        """Tokenize prompts. `plain` text gets a BOS token unless it has one."""
        if self._tokenizer.is_fast:
            ids = [encoding.ids for encoding in self._encodings(texts, with_offsets=False)]
        else:
            ids = [self._ids(text) for text in texts]
        return [self._started(prompt) for prompt in ids] if plain else ids

    def _started(self, ids: list[int]) -> list[int]:
        # Some templates write BOS themselves.
        return ids if ids[: len(self._start)] == self._start else self._start + ids

    def examples(self, batch: list[Pieces]) -> list[Tokens | TemplateFault]:
        """Tokenize examples. Returns tokens, or why an example is not trainable."""
        texts = [piece.text for pieces in batch for piece in pieces.texts]
        encodings = iter(self._encodings(texts, with_offsets=self._bytes is None))
        return [self._joined(pieces, encodings) for pieces in batch]

    def _joined(self, pieces: Pieces, encodings: Iterator[Encoding]) -> Tokens | TemplateFault:
        ids: list[int] = []
        spans: list[Span] = []
        weights: list[float] = []
        merged = False
        left_out: list[Span] = []
        for piece, encoding in zip(pieces.texts, encodings, strict=False):
            try:
                part = self._tokens(encoding, piece)
            except TemplateFault as fault:
                return fault
            spans += [(start + len(ids), stop + len(ids)) for start, stop in part.spans]
            weights += piece.weights
            left_out += [(start + len(ids), stop + len(ids)) for start, stop in self._left_out(piece, part)]
            ids += part.ids
            merged |= part.merged
        if pieces.plain:
            shift = len(self._started(ids)) - len(ids)
            left_out = [(start + shift, stop + shift) for start, stop in left_out]
            ids, spans = self._closed(ids, spans)
        # The first token is never a target: nothing predicts it.
        # Only the first span may consist of it.
        weights = weights[sum(stop <= 1 for _, stop in spans) :]
        spans = [(max(start, 1), stop) for start, stop in spans if stop > 1]
        num_unthought = sum(piece.num_unthought for piece in pieces.texts)
        num_inlined = sum(piece.num_inlined for piece in pieces.texts)
        weighted = tuple(weights)
        return Tokens(ids, spans, merged, num_unthought, num_inlined, left_out=tuple(left_out), weights=weighted)

    def _left_out(self, piece: Rendered, part: Tokens) -> list[Span]:
        """Return the tokens excluded by loss markers: those of full turns, and those with any excluded character.

        Excluded white space does not exclude a token of a trained word, because many tokens start with the space before
        their word.
        """
        turns = dict(zip(piece.spans, part.spans, strict=True))
        found = [turns[span] for span in piece.left_out if span in turns]
        within = [span for span in piece.left_out if span not in turns]
        if within:
            (encoding,) = self._encodings([piece.text], with_offsets=True)
            out = {place for start, stop in within for place in range(start, stop)}
            for place, bounds in enumerate(encoding.offsets):
                hidden = [character in out for character in range(*bounds)]
                words = [character in out for character in range(*bounds) if not piece.text[character].isspace()]
                if any(words) or (hidden and all(hidden)):
                    found.append((place, place + 1))
        return found

    def _tokens(self, encoding: Encoding, piece: Rendered) -> Tokens:
        """Return an example's tokens. Raises TemplateFault if a span does not start at a token."""
        # All of the text is trained, so no offsets are needed.
        if piece.spans == ((0, len(piece.text)),):
            return Tokens(encoding.ids, [(0, len(encoding.ids))])
        if self._bytes is not None:
            # Try byte lengths first, which are much faster than offsets.
            spans = self._bytes.spans(encoding.ids, piece.text, piece.spans)
            if spans is not None:
                return Tokens(encoding.ids, spans)
            (encoding,) = self._encodings([piece.text], with_offsets=True)
        return _tokens_by_offsets(encoding, piece)

    def _closed(self, ids: list[int], spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Add BOS and EOS to plain text. EOS belongs to the last trained span."""
        started = self._started(ids)
        shift = len(started) - len(ids)
        spans = [(start + shift, stop + shift) for start, stop in spans]
        # A text that ends with EOS already needs no second one.
        if started[-1:] != [self._end]:
            started = [*started, self._end]
            spans = [*spans[:-1], (spans[-1][0], len(started))] if spans else []
        return started, spans

    def check(self, tokens: Tokens, pieces: Pieces) -> None:
        """Raise TemplateFault if a rendered example's tokens are wrong.

        Trained tokens of each span must decode to its text, and tokens before the first span must equal the rollout
        prompt.
        """
        if pieces.plain:
            return
        (example,) = pieces.texts
        for (start, stop), (first, end) in zip(tokens.spans, example.spans, strict=True):
            decoded = self._tokenizer.decode(
                tokens.ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            written = example.text[first:end]
            if _comparable(decoded) != _comparable(written):
                raise TemplateFault(f"the trained tokens decode to {decoded[:80]!r} instead of {written[:80]!r}")
        if example.prompt is None or example.text[example.spans[0][0]].isspace():
            return  # leading white space of a response may merge with the template's, which depends on the row
        if tokens.ids[: tokens.spans[0][0]] != self.prompts([example.prompt], plain=False)[0]:
            raise TemplateFault(
                f"the chat template's generation prompt, which ends in {example.prompt[-12:]!r}, has other tokens "
                "alone than before a response, so that generation would start from tokens never seen in training"
            )


def _comparable(text: str) -> str:
    """Normalize text for comparison: tokenizers may normalize accents, drop the space before the first word, or add one
    after special tokens.
    """
    return "".join(unicodedata.normalize("NFC", text).split())


def _tokens_by_offsets(encoding: Encoding, piece: Rendered) -> Tokens:
    spans, merged = [], False
    for start, stop in piece.spans:
        first, last = _token_at(encoding, start, stop), encoding.char_to_token(stop - 1)
        if first is None or last is None:
            raise TemplateFault(f"the tokenizer has no token for {piece.text[start:stop][:60]!r}")
        opening, closing = encoding.token_to_chars(first) or (start, stop)
        if opening < start:
            shared = piece.text[start:closing]
            if shared.strip():
                raise TemplateFault(
                    f"the tokenizer makes one token of the template's {piece.text[opening:start]!r} and "
                    f"the assistant's {shared!r}: the template needs a special token or a space between them"
                )
            first, merged = first + 1, True
        spans.append((first, last + 1))
    return Tokens(encoding.ids, spans, merged)


def _token_at(encoding: Encoding, start: int, stop: int) -> int | None:
    """Return the first token in the span. Some tokenizers exclude white space from offsets, or have no token for it."""
    before = encoding.char_to_token(start - 1) if start else None
    if before is not None and encoding.char_to_token(start) is None:
        return before + 1
    tokens = (encoding.char_to_token(position) for position in range(start, stop))
    return next((token for token in tokens if token is not None), None)
