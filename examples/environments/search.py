"""A search agent: questions about a folder of texts, which the model searches before it answers.

TEXTS names the folder of `.txt` files, the first line of each being its title; `texts/` beside this file by default.
The reward is a verifier's, from the last turn: --reward_funcs exact, with the column `answer` of the row.
"""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("TEXTS") or Path(__file__).with_name("texts"))
NUM_RESULTS, EXCERPT_WORDS = 3, 40
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""The constants k1 and b of BM25."""


def words_in(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@dataclass(frozen=True)
class Document:
    title: str
    body: str
    counts: Counter[str]

    @classmethod
    def read(cls, path: Path) -> "Document":
        title, _, body = path.read_text(encoding="utf-8").partition("\n")
        return cls(title.strip(), body.strip(), Counter(words_in(title + " " + body)))

    def excerpt(self, wanted: set[str]) -> str:
        """Return the run of words that has the most of the wanted ones."""
        words = self.body.split()
        starts = range(max(1, len(words) - EXCERPT_WORDS + 1))
        best = max(starts, key=lambda start: len(wanted & {*words_in(" ".join(words[start : start + EXCERPT_WORDS]))}))
        return " ".join(words[best : best + EXCERPT_WORDS])


class Index:
    """The texts of a folder, ranked by BM25."""

    def __init__(self, folder: Path) -> None:
        self.documents = [Document.read(path) for path in sorted(folder.glob("*.txt"))]
        if not self.documents:
            raise FileNotFoundError(f"no .txt files in {folder}: set TEXTS to a folder that has some")
        self.mean_length = sum(one.counts.total() for one in self.documents) / len(self.documents)

    def search(self, query: str) -> list[Document]:
        """Return the best documents that have a word of the query."""
        scores = {place: self.score(one, words_in(query)) for place, one in enumerate(self.documents)}
        best = sorted(scores, key=lambda place: -scores[place])[:NUM_RESULTS]
        return [self.documents[place] for place in best if scores[place] > 0]

    def score(self, document: Document, words: list[str]) -> float:
        room = 1 - LENGTH_WEIGHT + LENGTH_WEIGHT * document.counts.total() / self.mean_length
        found = ((self.rarity(word), document.counts[word]) for word in words)
        return sum(rarity * count * (SATURATION + 1) / (count + SATURATION * room) for rarity, count in found)

    def rarity(self, word: str) -> float:
        number = sum(word in one.counts for one in self.documents)
        return math.log(1 + (len(self.documents) - number + 0.5) / (number + 0.5))


INDEX = Index(FOLDER)
"""Read once: the process of each episode is forked from the one that loaded this file."""


class Environment:
    def reset(self) -> None:
        """Begin an episode, which has nothing to remember."""

    def search(self, query: str) -> str:
        """Find texts.

        Args:
            query: words that the texts should have.
        """
        wanted = {*words_in(query)}
        found = [f"{document.title}: {document.excerpt(wanted)}" for document in INDEX.search(query)]
        return "\n".join(found) or "no text has any of these words"
