"""Built-in verifiers: whether a response gives the answer of its label.

Pure functions, each linear in the length of the response. Nothing a model wrote is ever evaluated. Answers that need
algebra to compare are left out: `boxed` and `gsm8k` know plain numbers.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_cli.rewards.numbers import Number, leading_number, parse_number, same_number

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)

# "#### 18 dollars, because ...": the number and its signs are among the first words.
_LEADING_WORDS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier found: the answer in `detail`, or why there is none (invalid) or no judgement (failed).

    `answer` is the answer in a form in which equal ones are equal texts, None where there is none.
    """

    status: Literal["correct", "wrong", "invalid", "failed"]
    detail: str
    answer: str | None = None


NO_LABEL = Verdict("failed", "the prompt has no label to compare with")

Verifier = Callable[[str, str | None], Verdict]


def exact(response: str, label: str | None) -> Verdict:
    """Whether the whole response is the label, apart from white space around it."""
    if label is None:
        return NO_LABEL
    answer = response.strip()
    if not answer:
        return Verdict("invalid", "empty response")
    return Verdict("correct" if answer == label.strip() else "wrong", _short(answer), answer)


def gsm8k(response: str, label: str | None) -> Verdict:
    """Whether the number behind the last `####` is the label's, words after it ignored as in the data set's own metric.

    The label is a number or a solution that ends in `#### number`.
    """
    marker, line = _after_marker(response)
    number = leading_number(" ".join(line.split(maxsplit=_LEADING_WORDS)[:_LEADING_WORDS])) if marker else None
    return _compare(number, line if marker else None, label, missing="no #### in the response")


def boxed(response: str, label: str | None) -> Verdict:
    r"""Whether the number in the last balanced `\boxed{}` (or `\fbox{}`) is the label's; text around it is ignored."""
    content = last_boxed(response)
    number = None if content is None else parse_number(content)
    return _compare(number, content, label, missing=r"no balanced \boxed{} in the response")


VERIFIERS: dict[str, Verifier] = {"gsm8k": gsm8k, "exact": exact, "boxed": boxed}


def load(argument: None) -> Callable[[list[Any]], list[str | None]]:
    """The handler of a worker: `[status, detail, answer]` for `[name of the verifier, response, label]`."""

    def handle(item: list[Any]) -> list[str | None]:
        name, response, label = item
        verdict = VERIFIERS[name](response, label)
        return [verdict.status, verdict.detail, verdict.answer]

    return handle


def last_boxed(text: str) -> str | None:
    r"""Content of the balanced `\boxed{}` or `\fbox{}` that begins last; escaped braces are text."""
    open_braces: list[int | None] = []  # for each open brace the start of its box's content, None if it is no box
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            open_braces.append(match.end())
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[last[0] : last[1]]


def _compare(number: Number | None, answer: str | None, label: str | None, *, missing: str) -> Verdict:
    """The verdict on an answer, None if there is none. A useless label comes first: it is no fault of the response."""
    if label is None:
        return NO_LABEL
    expected = label_number(label)
    if expected is None:
        return Verdict("failed", f"label {_short(label)!r} is not a number")
    if answer is None:
        return Verdict("invalid", missing)
    if number is None:
        return Verdict("invalid", f"{_short(answer.strip())!r} is not a number")
    status: Literal["correct", "wrong"] = "correct" if same_number(number, expected) else "wrong"
    return Verdict(status, _short(answer.strip()), number.key)


def label_number(label: str) -> Number | None:
    """The number of a label: the label itself, what stands behind its last `####`, or in its last box."""
    marker, line = _after_marker(label)
    content = last_boxed(label)
    return parse_number(line if marker else label if content is None else content)


def _after_marker(text: str) -> tuple[str, str]:
    """(`####` if the text has it else nothing, the first line behind the last of them)."""
    _, marker, tail = text.rpartition("####")
    return marker, tail.strip().partition("\n")[0]


def _short(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
