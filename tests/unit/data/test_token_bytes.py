"""Token spans from token lengths equal the tokenizer's own offsets, or there are none."""

import random
import unicodedata

import pytest
from chat_tokenizers import make_metaspace_tokenizer, make_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rlhf_cli.data.templates.chat_template import Rendered
from rlhf_cli.data.templates.rendering import Pieces
from rlhf_cli.data.tokenizing.token_bytes import TokenBytes
from rlhf_cli.data.tokenizing.tokenizer import Tokeniser, Tokens

SPECIALS = ["<|im_start|>", "<|im_end|>"]
WORDS = ["one", " two", "\n", "\n\n", "  ", " héllo", "中文字", " 🦊🦊", "a\u0301", "é", "\t", "1234", *SPECIALS]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("{{ messages }}", specials=SPECIALS, bos=None, eos="<|im_end|>")


def lengths_of(tokenizer):
    found = TokenBytes.of(tokenizer)
    assert found is not None
    return found


def random_text(rng):
    """Return a text and a random span of it, which may start and end within a token."""
    text = "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    start = rng.randrange(len(text))
    return text, (start, rng.randint(start + 1, len(text)))


def test_the_tokens_of_a_span_hold_its_text_from_its_start(tokenizer):
    rng, num_found = random.Random(0), 0
    backend = tokenizer.backend_tokenizer
    token_bytes = lengths_of(backend)
    for _ in range(2000):
        text, (start, stop) = random_text(rng)
        encoding = backend.encode(text, add_special_tokens=False)
        found = token_bytes.spans(encoding.ids, text, [(start, stop)])
        if found is None:
            continue
        ((first, end),) = found
        num_found += 1
        before = backend.decode(encoding.ids[:first], skip_special_tokens=False)
        assert before == text[:start]
        assert backend.decode(encoding.ids[:end], skip_special_tokens=False).startswith(text[:stop].rstrip("\ufffd"))
        assert len(backend.decode(encoding.ids[: end - 1], skip_special_tokens=False).rstrip("\ufffd")) < stop
    assert num_found > 400


def test_a_span_that_begins_within_a_token_is_left_to_the_offsets(tokenizer):
    backend = tokenizer.backend_tokenizer
    ids = backend.encode("1234<|im_end|>", add_special_tokens=False).ids
    assert lengths_of(backend).spans(ids, "1234<|im_end|>", [(5, 14)]) is None


def test_bytes_that_are_not_the_text_s_are_left_to_the_offsets():
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcĠ")}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("c+"), behavior="removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True, normalized=False)])
    token_bytes = lengths_of(tokenizer)
    for text, is_whole in [("ab a", True), ("abca", False), ("ab<end> a", False), ("abx", False)]:
        ids = tokenizer.encode(text).ids
        assert (token_bytes.spans(ids, text, [(1, 2)]) == [(1, 2)]) is is_whole
    assert token_bytes.spans([], "", []) == []


def test_text_that_the_normalizer_changes_is_left_to_the_offsets(tokenizer):
    tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301" * 3 + "\u0958"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    normal = unicodedata.normalize("NFC", text)
    assert len(normal.encode()) == len(text.encode())  # so that comparing the number of bytes is not enough
    assert lengths_of(tokenizer).spans(ids, normal, [(0, 1)]) is not None
    assert lengths_of(tokenizer).spans(ids, text, [(0, 1)]) is None


def test_other_kinds_of_tokenizers_have_no_lengths(tokenizer):
    metaspace = make_metaspace_tokenizer("{{ messages }}", specials=SPECIALS, bos=None, eos="<|im_end|>")
    assert TokenBytes.of(metaspace.backend_tokenizer) is None
    lowered = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    lowered.normalizer = normalizers.Lowercase()
    assert TokenBytes.of(lowered) is None


def test_examples_are_the_same_with_and_without_lengths(tokenizer, monkeypatch):
    rng = random.Random(1)
    batch = []
    for _ in range(500):
        text, (start, _) = random_text(rng)
        batch.append(Pieces((Rendered(f"{text}<|im_end|>\n", ((start, len(text) + 10),), None),), plain=False))
    by_lengths = Tokeniser(tokenizer).examples(batch)
    monkeypatch.setattr(TokenBytes, "of", lambda _: None)
    by_offsets = Tokeniser(tokenizer).examples(batch)
    assert [one if isinstance(one, Tokens) else str(one) for one in by_lengths] == [
        one if isinstance(one, Tokens) else str(one) for one in by_offsets
    ]
    assert sum(isinstance(one, Tokens) for one in by_lengths) > 100
