"""Right and wrong answers from labels: what a label's answer is, how else it is written, and what certainly differs."""

import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rlhf_cli.config.procedural import REWARD
from rlhf_cli.rewards.verifiers.answers import label_answer
from rlhf_cli.rewards.verifiers.code_tests import parse_tests
from rlhf_cli.rewards.verifiers.number_parsing import Number, parse_number, same_number

_CHOICE = re.compile(r"\(?([A-J])[).]?")
# Text that algebra may show to be equal to other text.
_FORMULA = re.compile(r"[\\^_={}<>\d]")
_FRACTION = re.compile(r"\\frac(?![a-z])")
NONSENSE = "987654321"
"""Answer that no label has."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The right answer of a row.

    Example: label `2 * 500 = 1,000 #### 1,000` has `Answer("1,000", "number", Number(Fraction(1000), False, ""))`.
    """

    text: str
    kind: Literal["number", "choice", "text", "formula"]
    number: Number | None = None


def answer_of(label: str | None) -> Answer | None:
    """Return a label's answer. None without a label, and for program tests, which are no responses."""
    if label is None or has_tests(label):
        return None
    problem = _problem(label)
    text = label_answer(_first_alternative(label)) if problem is None else str(problem["expected"] or "")
    if not text:
        return None
    if (number := parse_number(text)) is not None:
        return Answer(text, "number", number)
    if _CHOICE.fullmatch(text):
        return Answer(text, "choice")
    return Answer(text, "formula" if _FORMULA.search(text) else "text")


def has_tests(label: str) -> bool:
    """Return whether a label has tests of programs, or is another JSON object."""
    content = _json(label)
    # Single words are valid Python, but only assertions are tests.
    if isinstance(content, list):
        return any("assert" in str(piece) for piece in content)
    try:
        parse_tests(label)
    except ValueError:
        return isinstance(content, dict) and _problem(label) is None
    return True


def _problem(label: str) -> dict[str, object] | None:
    """Return the parsed label of a reasoning_gym problem; None for other labels."""
    content = _json(label)
    return content if isinstance(content, dict) and REWARD in content else None


def _first_alternative(label: str) -> str:
    """Return the first of the alternatives in a JSON list of strings; otherwise the label."""
    found = _json(label) if label.startswith("[") else None
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else label


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def surely_differ(one: Answer, other: Answer) -> bool:
    """Return whether two answers are certainly different, without algebra: False for formulas."""
    if one.kind != other.kind or one.kind == "formula":
        return False
    if one.number is not None and other.number is not None:
        return one.number.value != other.number.value and not same_number(one.number, other.number)
    left, right = (re.sub(r"\W+", " ", side.text).casefold().strip() for side in (one, other))
    # One text within the other may be the same answer with more words.
    return left != right and (one.kind == "choice" or (left not in right and right not in left))


def sort_key(answer: Answer) -> tuple[bool, Fraction, str]:
    """Return a key that puts similar answers next to each other: numbers by value, others by letters and digits."""
    value = Fraction(0) if answer.number is None else answer.number.value
    return answer.number is None, value, re.sub(r"[\W_]", "", answer.text).casefold()


def close_answers(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield wrong answers that are close to the right one, as (description, text)."""
    if answer.number is not None and _is_plain(answer.number):
        digits = answer.text
        yield "right answer + 1", _decimal(answer.number.value + 1) or f"({digits}) + 1"
        if answer.number.value:
            yield "right answer, negated", digits[1:] if digits.startswith("-") else f"-{digits}"
        # Rewards that search the label in the response pay for these.
        yield "right answer within a longer number", f"7{digits.lstrip('-+')}"
        if answer.number.value.denominator == 1 and "," not in digits and "." not in digits:
            yield "right answer as start of a longer number", f"{digits}7"
    elif answer.kind == "choice":
        letter = _letter(answer)
        yield "next letter", "A" if letter == "D" else string.ascii_uppercase[ord(letter) - ord("A") + 1]
    else:
        yield "nonsense", "none of these words" if answer.kind == "text" else NONSENSE


def other_answers(answer: Answer, candidates: list[Answer]) -> list[str]:
    """Return up to eight wrong answers to hide the right one among."""
    known = [other.text for other in candidates if surely_differ(answer, other)]
    if answer.kind == "choice":
        return [letter for letter in "ABCD" if letter != _letter(answer)]
    made_up = [text for _, text in close_answers(answer)] + [NONSENSE]
    return list(dict.fromkeys([*known, *made_up]))[:8]


def _letter(answer: Answer) -> str:
    match = _CHOICE.fullmatch(answer.text)
    assert match is not None
    return match[1]


def _is_plain(number: Number) -> bool:
    return not number.percent and not number.unit


def _decimal(value: Fraction) -> str | None:
    """Return the exact decimal, or None if it has more than six places."""
    if (value * 10**6).denominator != 1:
        return None
    sign, whole = ("-" if value < 0 else ""), abs(value)
    return sign + f"{int(whole)}" + f"{int(whole % 1 * 10**6):06d}".rstrip("0").join((".", "")) * (whole % 1 != 0)


@dataclass(frozen=True, slots=True)
class Spelling:
    """The right answer in other words. `is_equal_value`: it differs only in how the value is written."""

    name: str
    text: str
    is_equal_value: bool = False


def spellings(answer: Answer) -> list[Spelling]:
    """Return other ways to write the answer, without those that equal the label."""
    by_kind = {"number": _of_number, "choice": _of_choice, "text": _of_text, "formula": _of_formula}
    found = [*by_kind[answer.kind](answer), Spelling("bold", f"**{answer.text}**")]
    return [one for one in found if one.text != answer.text]


def _of_number(answer: Answer) -> Iterator[Spelling]:
    number = answer.number
    assert number is not None
    if _is_plain(number):
        yield from _of_value(number.value, answer.text)
        yield Spelling("currency", f"${answer.text}")
        yield Spelling("unit", f"{answer.text} apples")
        yield Spelling("equation", f"x = {answer.text}")
    yield Spelling("math mode", f"${answer.text}$")
    yield Spelling("period", f"{answer.text}.")


def _of_value(value: Fraction, text: str) -> Iterator[Spelling]:
    if (decimal := _decimal(value)) is not None:
        whole, point, places = decimal.partition(".")
        yield Spelling("plain decimal", decimal, is_equal_value="/" not in text and "\\" not in text)
        if abs(value) >= 1000:
            yield Spelling("thousands separators", f"{int(whole):,}{point}{places}", is_equal_value=True)
        yield Spelling("trailing zeros", f"{decimal}{'00' if point else '.00'}", is_equal_value=True)
    if value.denominator != 1:
        above, below = abs(value.numerator), value.denominator
        sign = "-" if value < 0 else ""
        yield Spelling("fraction", f"{sign}{above}/{below}")
        yield Spelling("LaTeX fraction", f"{sign}\\frac{{{above}}}{{{below}}}")


def _of_choice(answer: Answer) -> Iterator[Spelling]:
    letter = _letter(answer)
    for name, text in (("in parentheses", f"({letter})"), ("period", f"{letter}."), ("lower case", letter.lower())):
        yield Spelling(name, text)


def _of_text(answer: Answer) -> Iterator[Spelling]:
    yield Spelling("upper case", answer.text.upper())
    yield Spelling("lower case", answer.text.lower())
    yield Spelling("period", f"{answer.text}.")


def _of_formula(answer: Answer) -> Iterator[Spelling]:
    if _FRACTION.search(answer.text):
        yield Spelling("display fraction", _FRACTION.sub(r"\\dfrac", answer.text), is_equal_value=True)
    yield Spelling("math mode", f"${answer.text}$")
    yield Spelling("period", f"{answer.text}.")
