"""Stop strings are found in tokens at the right position, as early as possible."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlhf_cli.backends.rollout.stop_strings import StopStrings, stop_strings
from rlhf_cli.errors import UsageError
from rlhf_cli.models.scratch import train_tokenizer

TEXTS = ["<answer> 42 </answer> User: what, Human: who", "User Use answer 漢字 né é", "a</answer", " User: \n\nUser:"]
STOP = ("</answer>", "User:", " 漢字", "é", "\n\n")


@pytest.fixture(scope="module")
def byte_level():
    return train_tokenizer(TEXTS, vocab_size=320)


@pytest.fixture(scope="module")
def sentence_piece():
    """Return a tokenizer that drops the first space, like Llama 2's, and decodes unknown characters from bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "▁User", "User", "Use", "r", ":", ":▁", "</", "answer", ">", "▁漢", "字", "n", "é", "\n"]
    model = models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    blanks, first = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), first])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_end(stop, token_ids):
    """Return the number of tokens until the response stops, or None."""
    return next((n for n in range(1, len(token_ids) + 1) if stop.end(token_ids[:n])), None)


@pytest.mark.parametrize(
    ("text", "ends_with"),
    [
        ("so <answer> 42 </answer> and more", "</answer>"),
        ("Use r: User; Users: User: none", "User:"),  # half of it occurs twice before
        ("café", "é"),  # two bytes with separate tokens
        ("a 漢字", "漢字"),
        ("User</answer", None),
    ],
)
def test_a_response_ends_at_the_token_that_completes_a_stop_string(byte_level, text, ends_with):
    token_ids = byte_level(text).input_ids
    end = first_end(StopStrings(byte_level, STOP), token_ids)
    if ends_with is None:
        assert end is None
    else:
        assert ends_with in byte_level.decode(token_ids[:end])
        assert ends_with not in byte_level.decode(token_ids[: end - 1])


def test_one_token_may_hold_more_than_the_stop_string(byte_level):
    (token,) = byte_level("assistant").input_ids
    assert StopStrings(byte_level, ["sis"]).end([token])


def test_a_special_token_counts_as_it_is_written(byte_level):
    token_ids = byte_level("a<|endoftext|>").input_ids
    assert byte_level.all_special_ids.count(token_ids[-1]) == 1
    assert first_end(StopStrings(byte_level, ["<|endoftext|>"]), token_ids) == len(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
def test_the_last_tokens_tell_what_the_whole_text_does(name, request):
    """Random parts of stop strings, including the two bytes of a character."""
    tokenizer, draw = request.getfixturevalue(name), random.Random(0)
    stop = StopStrings(tokenizer, STOP)
    pieces = sorted(id for token, id in tokenizer.get_vocab().items() if not token.startswith("<0x"))
    likely = [id for id in pieces if tokenizer.decode([id]).strip() and tokenizer.decode([id]) in "".join(STOP)]
    likely += tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>"] if name == "sentence_piece" else ["Ã", "©"])
    ends = []
    for _ in range(200):
        token_ids = draw.choices(likely, k=40)
        texts = [tokenizer.decode(token_ids[:n]) for n in range(1, 41)]
        expected = next((n for n, text in enumerate(texts, 1) if any(one in text for one in STOP)), None)
        assert first_end(stop, token_ids) == expected, texts[-1]
        ends.append(expected)
    assert None in ends
    assert len(set(ends)) > 10


def test_a_blank_that_the_decoder_drops_before_the_first_token_is_part_of_a_stop_string(sentence_piece):
    token_ids = sentence_piece.convert_tokens_to_ids(["▁a", "▁", "<0xE6>", "<0xBC>", "<0xA2>"])
    assert sentence_piece.decode(token_ids) == "a 漢"
    assert first_end(StopStrings(sentence_piece, [" 漢"]), token_ids) == 5


def test_a_model_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="has no tokenizer"):
        stop_strings(str(tmp_path), ("a",), trust_remote_code=False)
