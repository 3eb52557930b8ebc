"""Built-in verifiers: compare the answer in a response with the label.

Pure functions in linear time. Model output is never evaluated. `boxed` and `gsm8k` compare plain numbers only; answers
that require algebra are in mathematics.py.
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_cli.rewards.verifiers.answers import after_marker, label_answer, last_boxed
from rlhf_cli.rewards.verifiers.number_parsing import Number, leading_number, parse_number, same_number

# "#### 18 dollars, because ...": the number, with signs, is within the first words. Bounds the work on long lines.
_LEADING_WORDS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result.

    - `status`: "invalid" if no answer was found, "failed" if the response could not be judged.
    - `detail`: the answer, or the reason for "invalid" and "failed".
    - `answer`: normalized answer; equal answers are equal strings. None without an answer.
    - `value`: the reward if it is not 1 for correct and 0 otherwise, such as the fraction of passed tests.
    """

    status: Literal["correct", "wrong", "invalid", "failed"]
    detail: str
    answer: str | None = None
    value: float | None = None


NO_LABEL = Verdict("failed", "the prompt has no label to compare with")


def exact(response: str, label: str | None) -> Verdict:
    """Exact match between response and label, ignoring surrounding whitespace."""
    if label is None:
        return NO_LABEL
    answer = response.strip()
    if not answer:
        return Verdict("invalid", "empty response")
    return Verdict("correct" if answer == label.strip() else "wrong", short(answer), answer)


def gsm8k(response: str, label: str | None) -> Verdict:
    """Compare the number after the last `####` with the label.

    Words after the number are ignored, as in GSM8K's official metric. The label is a number, or a solution that ends in
    `#### number`.
    """
    marker, line = after_marker(response)
    number = leading_number(" ".join(line.split(maxsplit=_LEADING_WORDS)[:_LEADING_WORDS])) if marker else None
    return _compare(number, line if marker else None, label, missing="no #### in the response")


def boxed(response: str, label: str | None) -> Verdict:
    r"""Compare the number in the last balanced `\boxed{}` or `\fbox{}` with the label."""
    content = last_boxed(response)
    number = None if content is None else parse_number(content)
    return _compare(number, content, label, missing=r"no balanced \boxed{} in the response")


def _compare(number: Number | None, answer: str | None, label: str | None, *, missing: str) -> Verdict:
    """Return the verdict on an extracted answer. `answer` is None if there was none."""
    # Check the label first: an unusable label fails the reward for every response, and the startup check relies on this
    # order (`Scorer.check_labels` passes empty responses).
    if label is None:
        return NO_LABEL
    expected = label_number(label)
    if expected is None:
        return Verdict("failed", f"label {short(label)!r} is not a number")
    if answer is None:
        return Verdict("invalid", missing)
    if number is None:
        return Verdict("invalid", f"{short(answer.strip())!r} is not a number")
    status: Literal["correct", "wrong"] = "correct" if same_number(number, expected) else "wrong"
    return Verdict(status, short(answer.strip()), number.key)


def label_number(label: str) -> Number | None:
    """Parse the number from a label: after the last `####`, in the last box, or the whole label."""
    return parse_number(label_answer(label))


def short(text: str, limit: int = 100) -> str:
    """Shorten text for messages."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
