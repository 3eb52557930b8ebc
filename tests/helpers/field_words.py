"""Compare the vocabulary of the project's prose with that of eight codebases of the field.

    python tests/helpers/field_words.py [PATH ...]     files or folders; rlhf_cli, docs and README.md by default
    python tests/helpers/field_words.py --show beside  print each place of a word or pair

Prose is docstrings, comments and Markdown outside code. Each row shows a word's occurrences per 1,000 words here, its
rate in the eight codebases, and the ratio. The last line adds up the rates beyond three times the field's. A high rate
marks a sentence to rewrite, not a word to replace.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

TABLE = Path(__file__).with_suffix(".tsv")
TOLERATED = 3
"""Times the field's rate at which a word starts to count."""
SMALLEST_RATE = 0.03
"""Occurrences per 1,000 words assumed for words that are rarer than this in the field: one use is no habit."""


def python_prose(source: str) -> str:
    """Return the docstrings, field docs and comments of Python code; other strings are left out."""
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n\n".join(texts + [token.string for token in tokens if token.type == tokenize.COMMENT])


def page_prose(source: str) -> str:
    """Return a Markdown page without its code blocks and inline code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)


def prose(path: Path) -> str:
    """Return the prose of a Python file or Markdown page."""
    source = path.read_text(encoding="utf-8")
    return page_prose(source) if path.suffix == ".md" else python_prose(source)


def field_rates() -> dict[str, float]:
    """Return occurrences per 1,000 words in the eight codebases, by word or pair."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {word: float(rate) for word, rate in rows}


def rates(text: str, words: Iterable[str]) -> dict[str, float]:
    """Return the occurrences of words and pairs per 1,000 words of a text."""
    found = re.findall(r"[a-z][a-z']+", text.lower())
    counts = Counter(found) + Counter(map(" ".join, pairwise(found)))
    return {word: 1000 * counts[word] / max(len(found), 1) for word in words}


def excess(text: str) -> dict[str, float]:
    """Return by how much each word exceeds `TOLERATED` times the field's rate, per 1,000 words, largest first."""
    field = field_rates()
    over = {word: rate - TOLERATED * max(field[word], SMALLEST_RATE) for word, rate in rates(text, field).items()}
    return dict(sorted(((word, value) for word, value in over.items() if value > 0), key=lambda item: -item[1]))


def files(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files and Markdown pages in files and folders."""
    for root in roots:
        yield from [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in {".py", ".md"})


def main() -> None:
    """Print the words that exceed the field's rates, or the places of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("rlhf_cli"), Path("docs"), Path("README.md")])
    parser.add_argument("--show", metavar="WORD", help="print each place of this word or pair")
    args = parser.parse_args()
    if args.show:
        for path in files(args.paths):
            for line in prose(path).splitlines():
                if re.search(rf"\b{re.escape(args.show)}\b", line, re.IGNORECASE):
                    print(f"{path}: {line.strip()}")
        return
    text = "\n\n".join(map(prose, files(args.paths)))
    field, over = field_rates(), excess(text)
    ours = rates(text, over)
    for word in over:
        print(f"{word:15} {ours[word]:7.2f} {field[word]:7.3f} {ours[word] / max(field[word], 0.001):7.0f}x")
    print(f"{len(text.split())} words; {sum(over.values()):.1f} per 1,000 exceed {TOLERATED} times the field's rates")


if __name__ == "__main__":
    main()
