r"""Answer extraction: the last balanced `\boxed{}` or the last `<answer>..</answer>` in a response."""

import re

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"


def tagged_answer(text: str) -> tuple[str, bool] | None:
    r"""Return (content of the last `\boxed{}` or `<answer>`, whichever begins later; whether it is from a box)."""
    box, tag = _boxed_span(text), _tag_span(text)
    if box is not None and (tag is None or box[0] > tag[0]):
        return text[slice(*box)].strip(), True
    return None if tag is None else (text[slice(*tag)].strip(), False)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{}` or `\fbox{}`. Escaped braces count as text."""
    span = _boxed_span(text)
    return None if span is None else text[slice(*span)]


def _boxed_span(text: str) -> tuple[int, int] | None:
    """Return the bounds of the last box's content."""
    # Content start for each open brace that belongs to a box, None for other braces.
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"]:
            open_braces.append(match.end())
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            # Nested boxes close from the inside out, so compare where they start.
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return last


def _tag_span(text: str) -> tuple[int, int] | None:
    end = text.rfind(_CLOSE_TAG)
    start = text.rfind(_OPEN_TAG, 0, max(end, 0))
    return None if end < 0 or start < 0 else (start + len(_OPEN_TAG), end)


def after_marker(text: str) -> tuple[str, str]:
    """Return (`####`, first line after the last `####`), or ("", first line) without one."""
    _, marker, tail = text.rpartition("####")
    return marker, tail.strip().partition("\n")[0]


def label_answer(label: str) -> str:
    """Return the answer in a label: the line after the last `####`, the content of the last box, or all of it."""
    marker, line = after_marker(label)
    content = last_boxed(label)
    return line if marker else (label if content is None else content).strip()
