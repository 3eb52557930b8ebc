"""Benchmark prompts in training data are found by their words, and instructions are not."""

from rlhf_cli.data.contamination import BenchmarkIndex, BenchmarkPrompt, texts_in, words_of

LETTERS = "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar"
ALPHABET = LETTERS.split()


def index_of(*texts: str) -> BenchmarkIndex:
    return BenchmarkIndex([BenchmarkPrompt("test", f"test line {n}", text) for n, text in enumerate(texts, start=1)])


def found(prompts: list[str], *rows: str) -> list[tuple[str, str, float, int]]:
    """Return prompt, row, share and number of rows of each overlap."""
    index = index_of(*prompts)
    for number, text in enumerate(rows, start=1):
        index.add(f"row {number}", [text])
    return [(one.prompt.where, one.row, one.share, one.num_rows) for one in index.overlaps()]


def test_words_ignore_case_and_punctuation_and_split_scripts_without_spaces() -> None:
    assert words_of("Compute $\\frac{1}{2}$, STRASSE_9!") == ("compute", "frac", "1", "2", "strasse", "9")
    assert words_of("求x的值") == ("求", "x", "的", "值")
    assert words_of(" \n.") == ()


def test_thirteen_shared_words_overlap_and_twelve_do_not() -> None:
    prompt = " ".join(ALPHABET)  # 15 words: three n-grams
    assert found([prompt], "x " + " ".join(ALPHABET[:12]) + " y " + " ".join(ALPHABET[3:])) == []
    # 13 of 15 words, from the second on.
    (overlap,) = found([prompt], "x. " + ", ".join(ALPHABET[1:14]).upper() + " y")
    assert overlap == ("test line 1", "row 1", 13 / 15, 1)
    assert found([prompt], prompt) == [("test line 1", "row 1", 1.0, 1)]


def test_the_row_that_contains_most_is_named_and_others_counted() -> None:
    prompt = " ".join(ALPHABET)
    index = index_of(prompt)
    for number, text in enumerate([" ".join(ALPHABET[2:]), prompt, prompt, "other"], start=1):
        index.add(f"row {number}", [text])
    (overlap,) = index.overlaps()
    assert (overlap.row, overlap.num_rows, overlap.share, overlap.shared) == ("row 2", 3, 1.0, prompt)


def test_prompts_of_eight_to_twelve_words_must_occur_as_a_whole() -> None:
    eight = " ".join(ALPHABET[:8])
    assert [share for _, _, share, _ in found([eight], f"Question: {eight}? Answer:")] == [1.0]
    assert found([eight], " ".join(ALPHABET[:7])) == []


def test_shorter_prompts_must_be_equal_to_a_text() -> None:
    assert found(["What is 2 + 3?"], "what is 2+3") == [("test line 1", "row 1", 1.0, 1)]
    assert found(["What is 2 + 3?"], "Tell me: what is 2 + 3?") == []


def test_instructions_of_more_than_ten_prompts_are_no_overlap() -> None:
    instruction = " ".join(ALPHABET[:13])
    eleven = [f"{instruction} {word}" for word in "abcdefghijk"]
    # 14 words: the second n-gram of each prompt, with its last word, is its own.
    assert found(eleven, f"other {instruction} z") == []
    assert [where for where, *_ in found(eleven, f"{instruction} c")] == ["test line 3"]
    assert len(found(eleven[:10], f"other {instruction} z")) == 10


def test_repeated_problems_are_not_taken_for_instructions() -> None:
    assert len(found([" ".join(ALPHABET)] * 32, " ".join(ALPHABET))) == 32


def test_prompts_without_an_ngram_of_their_own_are_counted() -> None:
    instruction = " ".join(ALPHABET[:13])
    index = index_of("...", *[f"{word} {instruction}" for word in "abcdefghijk"], instruction)
    assert index.num_unchecked == {"test": 2}


def test_texts_in_nested_cells_are_searched_separately() -> None:
    cell = {"prompt": [{"role": "user", "content": "a"}], "n": 3, "more": ("b", None)}
    assert list(texts_in(cell)) == ["user", "a", "b"]
