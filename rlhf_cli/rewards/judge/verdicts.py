"""Reads a judge's verdict: the last JSON object in its answer."""

import json
import math
import re
from collections.abc import Mapping

from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.remote.call import in_one_line

_READ = 50_000
"""Last characters of an answer that may contain the verdict, which bounds the time to search for it."""
_START = re.compile(r'\{\s*"')
_DECODER = json.JSONDecoder()


def last_object(answer: str) -> dict[str, object]:
    """Return the last JSON object in an answer that is not part of another. Raises BadResult without one."""
    text, found, end = answer[-_READ:], None, 0
    for start in _START.finditer(text):
        if start.start() < end:
            continue
        try:
            found, end = _DECODER.raw_decode(text, start.start())
        except ValueError:
            continue
        # Each of a thousand nested objects would be read again, which takes seconds.
        except RecursionError:
            break
    if found is None:
        raise BadResult(f"gave no verdict in JSON: {in_one_line(answer[-_READ:])}")
    return dict(found)


def number_in(verdict: Mapping[str, object], name: str, ends: tuple[float, float]) -> float:
    """Return a number from a verdict. Raises BadResult unless it is a number in the range."""
    if name not in verdict:
        raise BadResult(f"gave a verdict without {name!r}: {in_one_line(json.dumps(verdict))}")
    value = verdict[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadResult(f"gave the {name} {in_one_line(json.dumps(value))}, not a number")
    if not ends[0] <= value <= ends[1]:
        raise BadResult(f"gave the {name} {value:g}, outside {ends[0]:g} to {ends[1]:g}")
    return float(value)


def text_in(verdict: Mapping[str, object], name: str) -> str:
    """Return a text from a verdict, "" if there is none. Raises BadResult if it is no text."""
    text = verdict.get(name, "")
    if not isinstance(text, str):
        raise BadResult(f"gave the {name} {in_one_line(json.dumps(text))}, not a text")
    return text
