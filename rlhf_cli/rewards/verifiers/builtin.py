"""Built-in verifiers: whether a response gives the answer of its label.

Pure functions, each linear in the length of the response. Nothing a model wrote is ever evaluated. Answers that need
algebra to compare are in mathematics.py: `boxed` and `gsm8k` know plain numbers.
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_cli.rewards.verifiers.answers import after_marker, last_boxed
from rlhf_cli.rewards.verifiers.number_parsing import Number, leading_number, parse_number, same_number

# "#### 18 dollars, because ...": the number and its signs are among the first words.
_LEADING_WORDS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's result: the answer in `detail`, or why there is none (invalid) or no judgement (failed).

    `answer` is the answer in a form in which equal ones are equal texts, None if there is none. `value` is the
    reward if it is not simply 1 for correct and 0 for wrong and invalid, for example the share of tests that passed.
    """

    status: Literal["correct", "wrong", "invalid", "failed"]
    detail: str
    answer: str | None = None
    value: float | None = None


NO_LABEL = Verdict("failed", "the prompt has no label to compare with")


def exact(response: str, label: str | None) -> Verdict:
    """Return whether the whole response is the label, apart from white space around it."""
    if label is None:
        return NO_LABEL
    answer = response.strip()
    if not answer:
        return Verdict("invalid", "empty response")
    return Verdict("correct" if answer == label.strip() else "wrong", short(answer), answer)


def gsm8k(response: str, label: str | None) -> Verdict:
    """Return whether the number behind the last `####` is the label's, words after it ignored as in the data set's own
    metric.

    The label is a number or a solution that ends in `#### number`.
    """
    marker, line = after_marker(response)
    number = leading_number(" ".join(line.split(maxsplit=_LEADING_WORDS)[:_LEADING_WORDS])) if marker else None
    return _compare(number, line if marker else None, label, missing="no #### in the response")


def boxed(response: str, label: str | None) -> Verdict:
    """Return whether the number in the last balanced `\boxed{}` (or `\fbox{}`) is the label's; text around it is
    ignored.
    """
    content = last_boxed(response)
    number = None if content is None else parse_number(content)
    return _compare(number, content, label, missing=r"no balanced \boxed{} in the response")


def _compare(number: Number | None, answer: str | None, label: str | None, *, missing: str) -> Verdict:
    """Return the verdict on an answer, None if there is none. A useless label comes first: it is no fault of the
    response.
    """
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
    """Return the number of a label: the label itself, what stands behind its last `####`, or in its last box."""
    marker, line = after_marker(label)
    content = last_boxed(label)
    return parse_number(line if marker else label if content is None else content)


def short(text: str, limit: int = 100) -> str:
    """Return the text as it may stand in a sentence."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
