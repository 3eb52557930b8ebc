"""Benchmark prompts that occur in training data: n-grams of words, after appendix C of the GPT-3 paper (2005.14165).

A prompt overlaps with a row if they share 13 consecutive words, ignoring case and punctuation. Prompts of 8 to 12 words
must occur as a whole, and shorter ones must be equal to a text of the row: fewer words match by chance.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LONGEST, _SHORTEST = 13, 8
"""Words in an n-gram: the paper's maximum and minimum."""
_COMMON = 10
"""Prompts of a benchmark that may share an n-gram. One in more of them is an instruction, not a problem; the paper uses
the same number for documents."""
_UNSPACED = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
"""Scripts without spaces between words (Thai, Lao, Japanese, Chinese). Each of their characters counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

_Words = tuple[str, ...]


def words_of(text: str) -> _Words:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(_WORD.findall(text.casefold()))


@dataclass(frozen=True)
class BenchmarkPrompt:
    """A prompt of a benchmark, with its file and line."""

    benchmark: str
    where: str
    text: str


@dataclass(frozen=True)
class Overlap:
    """A benchmark prompt that occurs in training data.

    - `row`: file and line of the training row that contains most of it.
    - `share`: fraction of the prompt's words in n-grams that this row contains.
    - `num_rows`: number of training rows with any of its n-grams.
    - `shared`: the first words that the row shares.
    """

    prompt: BenchmarkPrompt
    row: str
    share: float
    num_rows: int
    shared: str


@dataclass(frozen=True)
class _Best:
    """The row that contains most n-grams of a prompt, with their positions in the prompt."""

    row: str
    positions: frozenset[int]


class BenchmarkIndex:
    """Finds benchmark prompts in training rows, which are added one by one.

    `num_unchecked` counts prompts by benchmark that have only n-grams of instructions, or no words.
    """

    def __init__(self, prompts: Sequence[BenchmarkPrompt]) -> None:
        self._prompts = prompts
        self._words = [words_of(prompt.text) for prompt in prompts]
        self._best: dict[int, _Best] = {}
        self._num_rows: Counter[int] = Counter()
        common = self._common_grams()
        # Prompts and positions of each n-gram; those of short prompts are whole texts.
        self._places: dict[_Words, list[tuple[int, int]]] = defaultdict(list)
        self.num_unchecked: Counter[str] = Counter()
        for number, (prompt, words) in enumerate(zip(prompts, self._words, strict=True)):
            grams = [(place, gram) for place, gram in _grams(words) if (prompt.benchmark, gram) not in common]
            self.num_unchecked[prompt.benchmark] += not grams
            for place, gram in grams:
                self._places[gram].append((number, place))
        self._lengths = sorted({len(gram) for gram in self._places if len(gram) >= _SHORTEST})

    def _common_grams(self) -> set[tuple[str, _Words]]:
        """Return n-grams in more than `_COMMON` different prompts of a benchmark."""
        named = zip(self._prompts, self._words, strict=True)
        # Some published files repeat each problem, which makes none of it an instruction.
        different = {(prompt.benchmark, words) for prompt, words in named}
        counts = Counter((benchmark, gram) for benchmark, words in different for gram in {g for _, g in _grams(words)})
        return {key for key, count in counts.items() if count > _COMMON}

    def add(self, row: str, texts: Iterable[str]) -> None:
        """Search the texts of the training row at `row` (file and line)."""
        found: dict[int, set[int]] = defaultdict(set)
        for text in texts:
            words = words_of(text)
            candidates = [words] if len(words) < _SHORTEST else []
            candidates += [words[i : i + n] for n in self._lengths for i in range(len(words) - n + 1)]
            for gram in candidates:
                for number, place in self._places.get(gram, ()):
                    found[number].add(place)
        for number, positions in found.items():
            self._num_rows[number] += 1
            if number not in self._best or len(positions) > len(self._best[number].positions):
                self._best[number] = _Best(row, frozenset(positions))

    def overlaps(self) -> list[Overlap]:
        """Return the prompts that were found, those with the largest share first."""
        found = [self._overlap(number, best) for number, best in sorted(self._best.items())]
        return sorted(found, key=lambda overlap: -overlap.share)

    def _overlap(self, number: int, best: _Best) -> Overlap:
        words = self._words[number]
        covered = {place + offset for place in best.positions for offset in range(min(_LONGEST, len(words)))}
        first = min(covered)
        end = next(place for place in range(first, len(words) + 1) if place not in covered)
        share, shared = len(covered) / len(words), " ".join(words[first:end])
        return Overlap(self._prompts[number], best.row, share, self._num_rows[number], shared)


def _grams(words: _Words) -> list[tuple[int, _Words]]:
    """Return the n-grams with their positions: of 13 words, or the whole text if it is shorter."""
    length = min(_LONGEST, len(words))
    return [(place, words[place : place + length]) for place in range(len(words) - length + 1)] if words else []


def texts_in(value: object) -> Iterable[str]:
    """Yield all texts in a cell, also those in lists and objects, such as messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from texts_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_in(entry)
