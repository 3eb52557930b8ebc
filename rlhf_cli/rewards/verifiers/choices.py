"""The `multiple_choice` verifier. Pure functions in linear time."""

import re
import string

from rlhf_cli.rewards.verifiers.answers import tagged_answer
from rlhf_cli.rewards.verifiers.builtin import NO_LABEL, Verdict, short

_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|[*$_`]")
_STATED = re.compile(r"\b(?i:answer|choice|option)\b(?: is)?\s?:?\s?\(?\s?(?P<letter>[A-Z])\b(?!')")
_ALONE = re.compile(r"^[ \t]*\(?(?P<letter>[A-Z])(?:[).:]|[ \t]*$)", re.MULTILINE)
_LEADING = re.compile(r"\s*\(?\s*(?P<letter>[A-Za-z])\s*(?:[).:]|$)")


def multiple_choice(response: str, label: str | None, *, choices: int) -> Verdict:
    r"""Compare the chosen letter with the label. Valid letters are the first `choices` letters in the alphabet.

    The choice is the first match in this order:

    1. the last `\boxed{}` or `<answer>`: `B`, `(B)` or `B. because`,
    2. the letter after the last "answer is", "answer:", "choice" or "option",
    3. the last line that starts like a list item (`B.`, `B)`) or consists only of the letter.
    """
    if label is None:
        return NO_LABEL
    letters = string.ascii_uppercase[:choices]
    expected = _leading(label, letters)
    if expected is None:
        return Verdict("failed", f"label {short(label)!r} is not one of the letters {letters[0]} to {letters[-1]}")
    chosen = _chosen(response, letters)
    if chosen is None:
        return Verdict("invalid", f"no letter from {letters[0]} to {letters[-1]} in the response")
    return Verdict("correct" if chosen == expected else "wrong", chosen, chosen)


def _chosen(response: str, letters: str) -> str | None:
    tagged = tagged_answer(response)
    if tagged is not None:
        response = tagged[0]
        if (letter := _leading(response, letters)) is not None:
            return letter
    plain = _STYLE.sub(r"\1", response)
    for pattern in (_STATED, _ALONE):
        matches = [match["letter"] for match in pattern.finditer(plain) if match["letter"] in letters]
        # The last match: reasoning often discusses several options before the answer.
        if matches:
            return matches[-1]
    return None


def _leading(text: str, letters: str) -> str | None:
    """Return the leading letter, as in `(b) because`."""
    match = _LEADING.match(_STYLE.sub(r"\1", text))
    letter = match["letter"].upper() if match else ""
    return letter if letter and letter in letters else None
