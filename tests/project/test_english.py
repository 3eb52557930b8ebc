"""Prose of every part keeps to the field's vocabulary and is free of four constructs that make it hard to read."""

import ast
import functools
import re
from pathlib import Path

import pytest
from field_words import excess, field_rates, page_prose, prose, python_prose

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
EXCESS = {
    "rlhf_cli/*.py": 15,
    "rlhf_cli/agents": 15,
    "rlhf_cli/algorithms": 15,
    "rlhf_cli/backends": 15,
    "rlhf_cli/commands": 20,
    "rlhf_cli/config": 20,
    "rlhf_cli/data": 20,
    "rlhf_cli/foreign": 15,
    "rlhf_cli/models": 15,
    "rlhf_cli/rewards": 15,
    "rlhf_cli/runs": 15,
    "rlhf_cli/tracking": 15,
    "rlhf_cli/trainers": 20,
    "benchmarks": 20,
    "tests": 40,
    "pages": 10,
}
"""Occurrences per 1,000 words beyond three times the field's rates (`field_words.excess`). Lower it with the prose."""


def messages(source: str) -> str:
    """Return the text of the errors that Python code raises, without the values in them."""
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc is not None]
    constants = [node.value for error in raised for node in ast.walk(error) if isinstance(node, ast.Constant)]
    return "\n\n".join(text for text in constants if isinstance(text, str))


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


@functools.cache
def text_of(part: str) -> str:
    """Return the prose of a part of the tree."""
    return "\n\n".join(map(prose, parts()[part]))


@pytest.mark.parametrize("part", sorted(EXCESS))
def test_words_of_a_part_stay_near_the_rates_of_the_field(part: str) -> None:
    over = excess(text_of(part))
    assert sum(over.values()) <= EXCESS[part], f"{part}: python tests/helpers/field_words.py lists {list(over)[:8]}"


def test_only_words_over_three_times_the_rate_of_the_field_exceed_it() -> None:
    assert excess("tensor beside tensor") == pytest.approx({"beside": 1000 / 3 - 3 * 0.03})
    assert excess("loss of tokens, gradient of weights")["of"] == pytest.approx(1000 / 3 - 3 * field_rates()["of"])


@pytest.mark.parametrize("part", sorted(parts()))
def test_prose_of_a_part_stays_within_the_limit(part: str) -> None:
    found = dict(zip(CONSTRUCTS, rates(text_of(part)), strict=True))
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
