"""Four constructs that make prose hard to read stay rare in docstrings, comments, pages and messages of every part."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRUCTS = {
    "noun clause": re.compile(
        r"\bwhat\s+(?:is|was|are|has|a|the|it|they|this|to|of|one|each|others|there|nobody|comes|came|happened)\b", re.I
    ),
    "conditional place": re.compile(
        r"\bwhere\s+(?:it|they|there|that|this|these|such|one|a|the|no|none|nobody|some|several|both)\b", re.I
    ),
    "speaking code": re.compile(r"\b(?:say|says|said|tell|tells|told)\b", re.I),
    "pronoun with genitive": re.compile(r"\bthose\s+(?:of|that|which|who)\b|\bthat\s+of\b", re.I),
}
LIMIT = 1.0
"""Occurrences of each construct in 1,000 words."""


def python_prose(source: str) -> str:
    """Return the docstrings, field docs and comments of Python code; other strings are left out."""
    texts = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n\n".join(texts + [token.string for token in tokens if token.type == tokenize.COMMENT])


def messages(source: str) -> str:
    """Return the text of the errors that Python code raises, without the values in them."""
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc is not None]
    constants = [node.value for error in raised for node in ast.walk(error) if isinstance(node, ast.Constant)]
    return "\n\n".join(text for text in constants if isinstance(text, str))


def page_prose(source: str) -> str:
    """Return a Markdown page without its code blocks and inline code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)


def rates(text: str) -> tuple[float, ...]:
    """Compute the occurrences of each construct in 1,000 words."""
    num_words = max(len(text.split()), 1)
    return tuple(1000 * len(pattern.findall(text)) / num_words for pattern in CONSTRUCTS.values())


def parts() -> dict[str, list[Path]]:
    """Return the files of each part of the tree: folders of the package, tests, benchmarks, and pages."""
    package = ROOT / "rlhf_cli"
    folders = [folder for folder in sorted(package.iterdir()) if folder.is_dir() and any(folder.rglob("*.py"))]
    return {
        "rlhf_cli/*.py": sorted(package.glob("*.py")),
        **{f"rlhf_cli/{folder.name}": sorted(folder.rglob("*.py")) for folder in folders},
        "benchmarks": sorted((ROOT / "benchmarks").rglob("*.py")),
        # This file quotes the constructs.
        "tests": [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)],
        "pages": [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    }


def prose(paths: list[Path]) -> str:
    """Return the prose of files, one text."""
    texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
    return "\n\n".join(page_prose(text) if suffix == ".md" else python_prose(text) for suffix, text in texts)


@pytest.mark.parametrize("part", sorted(parts()))
def test_prose_of_a_part_stays_within_the_limit(part: str) -> None:
    found = dict(zip(CONSTRUCTS, rates(prose(parts()[part])), strict=True))
    too_many = {name: f"{rate:.2f}" for name, rate in found.items() if rate > LIMIT}
    assert not too_many, f"{part}: occurrences in 1,000 words; patterns are in CONSTRUCTS: {too_many}"


def test_messages_of_errors_stay_within_the_limit() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "rlhf_cli").rglob("*.py"))]
    found = dict(zip(CONSTRUCTS, rates("\n\n".join(map(messages, sources))), strict=True))
    assert max(found.values()) <= LIMIT, found


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Return what the server sent.", (1, 0, 0, 0)),
        ("What is left\nover: what\nit needs.", (2, 0, 0, 0)),
        ("None where there is no value, zero where none counts.", (0, 2, 0, 0)),
        ("The folder where checkpoints lie; what prompts need.", (0, 0, 0, 0)),
        ("The message says why; nobody told it to tell.", (0, 0, 3, 0)),
        ("Long storytelling sayings.", (0, 0, 0, 0)),
        ("Weights like those of the policy, at a rate like that of the critic.", (0, 0, 0, 2)),
        ("Those weights that move.", (0, 0, 0, 0)),
    ],
)
def test_constructs_are_counted_in_sentences(sentence: str, expected: tuple[int, ...]) -> None:
    num_words = len(sentence.split())
    assert rates(sentence) == pytest.approx([1000 * count / num_words for count in expected])


def test_only_docstrings_field_docs_and_comments_of_code_are_prose() -> None:
    source = '"""Module."""\n\nlimit = 3  # tokens\n"""Field."""\nmessage = "what is it"\n'
    assert python_prose(source).split() == ["Module.", "Field.", "#", "tokens"]


def test_only_the_text_of_raised_errors_is_a_message() -> None:
    source = 'try:\n    name = "what is it"\nexcept OSError:\n    raise ValueError(f"no {name} " "here") from None\n'
    assert messages(source).split() == ["no", "here"]


def test_code_in_a_page_is_not_prose() -> None:
    assert page_prose("Run `what is` now:\n```sh\ntell those of\n```\nDone.").split() == ["Run", "now:", "Done."]
