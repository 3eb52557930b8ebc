"""Teachers with their own tokenizers: token texts, common positions, shared events, and their sequences."""

import json
from typing import Any

import numpy as np
import pytest
from bpe_tokenizers import bpe
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_cli.config.data import DataConfig, PromptConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.readings import taught_pack
from rlhf_cli.data.prompts import Prompt, load_prompts
from rlhf_cli.data.sft_data import SEQUENCES
from rlhf_cli.data.teachers import aligned_sequences, as_teachers_read
from rlhf_cli.data.tokenizing.alignment import SharedEvents, shared_spans
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.data.tokenizing.token_texts import END, TokenTexts
from rlhf_cli.errors import UsageError

STUDENT, TEACHER = bpe("straw", "berry"), bpe("strawberry", end="</s>", special=("<|pad|>",))


def texts(tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(tokenizer, [tokenizer.eos_token_id], num_rows=len(tokenizer), what="the model")


def tokens() -> TeacherTokens:
    return TeacherTokens(texts(STUDENT), texts(TEACHER))


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def pieces(*words: str, vocabulary: dict[str, int] | None = None, prefix: str = "never") -> PreTrainedTokenizerFast:
    """Return a tokenizer in SentencePiece's notation, with bytes for unknown characters."""
    known = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE({token: number for number, token in enumerate(known)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("a| b|c", "a| bc", [[0, 0, 1, 1], [1, 1, 2, 1]]),
        ("straw|berry", "strawberry", [[0, 0, 2, 1]]),
        ("ab|c|de", "a|bc|d|e", [[0, 0, 2, 2], [2, 2, 1, 2]]),
        ("a|x|c", "a|y|c", [[0, 0, 1, 1]]),
        ("a|xb|c", "a|x|y", [[0, 0, 1, 1], [1, 1, 0, 0]]),
        ("a|b", "a|b|c", [[0, 0, 1, 1], [1, 1, 1, 1]]),
        ("", "a", []),
    ],
)
def test_spans_by_hand(own, other, expected):
    found = shared_spans(*([part.encode() for part in text.split("|")] for text in (own, other)))
    assert found.tolist() == expected


def test_texts_of_byte_level_tokens_join_to_the_text_and_ends_are_marked():
    for text in ("strawberry é 你好\n", "<|im_end|>"):
        found = b"".join(texts(STUDENT).of(encoded(STUDENT, text)))
        assert found == (END if text == "<|im_end|>" else text.encode())


@pytest.mark.parametrize("prefix", ["never", "always"])
def test_texts_of_pieces_are_bytes_and_an_added_space_is_left_out(prefix):
    characters = sorted({*"It's12,34590+x=y;def(a):returnastrawby"})
    tokenizer = pieces("▁", *characters, prefix=prefix)
    found = texts(tokenizer)
    ids = found.encoded("a straw é")
    assert b"".join(found.of(ids)) == "a straw é".encode()
    assert len(found.of(ids)) == len("a straw é".encode())


def test_a_tokenizer_that_changes_text_is_refused():
    tokenizer = bpe("straw")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UsageError, match=r"the model: its tokenizer changes text .*It's.* becomes .*it's"):
        texts(tokenizer)


def test_tokens_of_one_vocabulary_count_as_the_shared_tokens_that_they_start_with():
    found = tokens().events
    names = [STUDENT.convert_ids_to_tokens(int(token)) for token in found.tokens]

    def event(tokenizer: PreTrainedTokenizerFast, side: np.ndarray, token: str) -> str | None:
        number = int(side[tokenizer.convert_tokens_to_ids(token)])
        return names[number] if number < len(names) else None

    of_teacher = {token: event(TEACHER, found.teacher, token) for token in ("strawberry", "strawb", "straw", "b")}
    assert of_teacher == {"strawberry": "straw", "strawb": "straw", "straw": "straw", "b": "b"}
    of_student = {token: event(STUDENT, found.student, token) for token in ("berry", "be", "straw")}
    assert of_student == {"berry": "b", "be": "b", "straw": "straw"}
    assert event(STUDENT, found.student, "<|im_end|>") == event(TEACHER, found.teacher, "</s>") == "<|im_end|>"
    assert event(TEACHER, found.teacher, "<|pad|>") is None


def test_equal_tokenizers_share_all_tokens_with_several_ends_apart():
    ends = [STUDENT.eos_token_id, 5]
    own = TokenTexts(STUDENT, ends, num_rows=999, what="the model")
    found = SharedEvents.of(own, own)
    assert found.student.tolist() == found.teacher.tolist() == found.tokens.tolist() == list(range(len(STUDENT)))
    merged = SharedEvents.of(own, texts(TEACHER))
    assert merged.student[5] == merged.student[STUDENT.eos_token_id] == merged.teacher[TEACHER.eos_token_id]


def test_tokens_that_a_model_cannot_predict_are_no_events():
    size = STUDENT.convert_tokens_to_ids("berry")
    ends = [STUDENT.convert_tokens_to_ids("!")]
    short = TokenTexts(STUDENT, ends, num_rows=size, what="the model")
    found = SharedEvents.of(texts(STUDENT), short)
    assert len(found.teacher) == size
    assert set(found.student.tolist()) - {len(found.tokens)} == set(found.teacher.tolist())


def test_a_response_is_read_in_the_teachers_tokens_after_its_own_prompt():
    response = [*encoded(STUDENT, "strawberry berry"), STUDENT.eos_token_id]
    assert STUDENT.convert_ids_to_tokens(response) == ["straw", "berry", "Ġ", "berry", "<|im_end|>"]
    own = TokenSequence(np.array([1, 2, *response], np.int32), np.array([False] * 2 + [True] * 5))
    found = tokens().sampled(own, [7, 8, 9])
    read = found.teacher_reads
    assert read is not None
    tail = TEACHER.convert_ids_to_tokens(read.token_ids[3:].tolist())
    assert tail == ["strawberry", "Ġ", "b", "e", "r", "r", "y", "</s>"]
    assert read.token_ids[:3].tolist() == [7, 8, 9]
    assert read.loss_mask.tolist() == [False] * 3 + [True] * 8
    assert found.teacher_rows is not None
    assert found.teacher_rows.tolist() == [[0, 0, 2, 1], [2, 1, 1, 1], [3, 2, 1, 5], [4, 7, 1, 1]]
    assert (found.token_ids.tolist(), found.num_trained) == (own.token_ids.tolist(), 5)


def broken_response() -> TokenSequence:
    """Return "a", a byte that is no text, and "straw"."""
    response = [*encoded(STUDENT, "a"), encoded(STUDENT, "é")[0], *encoded(STUDENT, "straw")]
    return TokenSequence(np.array([1, *response], np.int32), np.array([False] + [True] * 3))


def test_a_teacher_reads_bytes_that_are_no_text_as_tokens_of_single_bytes():
    found = tokens().sampled(broken_response(), [7])
    assert found.teacher_rows is not None
    assert found.teacher_rows.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [2, 2, 1, 1]]
    assert found.teacher_reads is not None
    ids = found.teacher_reads.token_ids[1:].tolist()
    assert b"".join(texts(TEACHER).of(ids)) == b"a\xc3straw"


def test_without_tokens_of_single_bytes_such_bytes_end_what_is_compared():
    teacher = texts(TEACHER)
    teacher._single_bytes = {}
    found = TeacherTokens(texts(STUDENT), teacher).sampled(broken_response(), [7])
    assert found.teacher_rows is not None
    assert found.teacher_rows.tolist() == [[0, 0, 1, 1]]


def test_a_micro_batch_has_the_common_targets_of_each_sequence():
    response = encoded(STUDENT, "strawberrya")
    own = TokenSequence(np.array([1, *response], np.int32), np.array([False] + [True] * len(response)))
    found = taught_pack([tokens().sampled(own, [7, 7]), tokens().sampled(own, [8])], 1)
    (reading,) = found.readings
    assert found.pack.targets_K.numel() == 6
    assert reading.rows_k is not None
    assert reading.rows_k.tolist() == [0, 2, 3, 5]
    assert reading.spans is not None
    assert reading.spans.tolist() == [[0, 0, 2, 1], [2, 1, 1, 1], [3, 2, 2, 1], [5, 3, 1, 1]]
    assert reading.pack.targets_K.tolist() == (encoded(TEACHER, "strawberry") + encoded(TEACHER, "a")) * 2


def load(tmp_path, tokenizer: Any, rows: list[Any], *, max_len: int = 256) -> LoadedData[TokenSequence]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(dataset=str(path), max_len=max_len, overlong="drop")
    return SEQUENCES.load(config, tokenizer, dataset=str(path), split="train", seed=0)


def talk(*answers: str) -> dict[str, object]:
    turns = [({"role": "user", "content": "Fruit?"}, {"role": "assistant", "content": answer}) for answer in answers]
    return {"messages": [message for turn in turns for message in turn]}


def test_rows_are_aligned_turn_by_turn_in_the_chat_templates_of_both(tmp_path):
    rows = [talk("strawberry", "berry"), talk("straw")]
    own, other = (load(tmp_path, tokenizer, rows) for tokenizer in (STUDENT, TEACHER))
    found = aligned_sequences(own, own.items, [other], [tokens()])
    rows_of_both = [[0, 0, 2, 1], [2, 1, 1, 1], [3, 2, 1, 5], [4, 7, 1, 1]]
    assert [one.teacher_rows.tolist() for one in found[:]] == [rows_of_both, [[0, 0, 1, 1], [1, 1, 1, 1]]]
    read = found[0].teacher_reads
    targets = TEACHER.convert_ids_to_tokens(read.token_ids[read.loss_mask].tolist())
    assert targets == ["strawberry", "</s>", *"berry", "</s>"]
    assert TEACHER.decode(read.token_ids).startswith("[user]Fruit?</s>[assistant]strawberry</s>[user]")


def test_rows_that_a_teacher_cannot_read_are_refused(tmp_path):
    rows = [talk("straw"), talk("berry" * 30)]
    own, short = load(tmp_path, STUDENT, rows), load(tmp_path, TEACHER, rows, max_len=100)
    with pytest.raises(UsageError, match="line 2: the row is too long in the tokens of its teacher: raise --max_len"):
        aligned_sequences(own, own.items, [short], [tokens()])


def test_prompts_have_the_tokens_of_their_teachers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("straw?", "berry" * 9)))

    def loaded(tokenizer: Any, max_len: int = 256) -> Any:
        config = PromptConfig(prompt_data=str(path), max_len=max_len)
        return load_prompts(config, tokenizer, max_new_tokens=8, seed=0).prompts

    own, other = loaded(STUDENT), loaded(TEACHER)
    found: list[Prompt] = list(as_teachers_read(own, [other]))
    assert [prompt.prompt_ids for prompt in found] == [prompt.prompt_ids for prompt in own]
    assert [prompt.teacher_ids for prompt in found] == [prompt.prompt_ids for prompt in other]
    assert [prompt.index for prompt in as_teachers_read(own, [loaded(TEACHER, 48)])] == [0]
    with pytest.raises(UsageError, match="no prompt has room for a response in the teacher's tokens"):
        as_teachers_read(own[1:], [loaded(TEACHER, 48)])
