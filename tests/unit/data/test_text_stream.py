"""Streamed text of tokens equals the text of all tokens, and never splits a character."""

import pytest
import torch
from chat_tokenizers import CHATML, make_tokenizer
from conftest import make_tiny_tokenizer

from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.text_stream import TextStream

TEXTS = ["the 答案 is 🙂👩‍👩‍👧 ✓, naïve\n\ttabs", "", "🙂", " leading and trailing "]


def pieces_of(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*map(stream.add, ids), stream.rest()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [make_tiny_tokenizer, lambda: make_tokenizer(CHATML)])
def test_pieces_are_the_text_and_have_whole_characters(make, text):
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text_of(tokenizer, ids, skip_special_tokens=True)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer("a🙂b", add_special_tokens=False).input_ids
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_bytes_that_become_no_character_are_given_at_the_end():
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer("a🙂", add_special_tokens=False).input_ids[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert pieces[:-1] == ["a", "", "", ""]
    assert "".join(pieces) == text_of(tokenizer, ids, skip_special_tokens=True)


def test_random_tokens_with_special_ones_among_them_give_the_same_text():
    tokenizer = make_tiny_tokenizer()
    for seed in range(20):
        ids = torch.randint(0, len(tokenizer), (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert "".join(pieces_of(tokenizer, ids)) == text_of(tokenizer, ids, skip_special_tokens=True)


def test_a_word_piece_tokenizer_keeps_its_spaces():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "▁one": 1, "▁two": 2, "▁": 3, "<0xE7>": 4, "<0xAD>": 5, "<0x94>": 6, "s": 7}
    backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    pieces = pieces_of(tokenizer, [1, 2, 7, 3, 4, 5, 6, 1])
    assert pieces == ["one", " two", "s", " ", "", "", "答", " one", ""]
