"""Plain numbers in text, compared as numbers.

Knows signs, thousands separators, decimals, repeating ones too, powers of ten in all spellings, fractions, mixed
numbers, percent, currency signs and a unit behind the number. Values are exact. Algebra is in mathematics.py. Text of a
model is matched, never evaluated, and every step is linear in its length.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

# Characters of an answer that are looked at. No number a person asks for is longer, and arithmetic on numbers of this
# length takes microseconds (Python refuses to read integers of more than 4,300 digits).
MAX_NUMBER_LENGTH = 1_000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\d.]))?"
# 3 digits, because Python refuses to write integers of more than 4,300 digits. Latin x is a sign of multiplication too.
_POWER = r"10\s*(?:\^|\*\*)\s*(?:\{\s*(?:[+-]\s*)?\d{1,3}\s*\}|[+-]?\d{1,3}(?!\d))"
_TIMES = r"\s*(?:\\times|\\cdot|\\ast|[*\u00d7\u00b7\u22c5xX])\s*"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?) \s* [$€£]? \s* (?P<sign_after>[+-]?) \s*
    (?: (?P<mixed>\d{{1,3}}) (?: \s* (?=\\[dt]?frac) | \s+ (?=\d+\s*/\s*\d) ) )?
    (?: \\[dt]?frac \s* (?P<above>\d|\{{\s*-?\d+\s*\}}) \s* (?P<under>\d|\{{\s*\d+\s*\}})
      | (?P<bare>{_POWER})
      | (?P<whole>{_DECIMAL}) (?: {_TIMES} (?P<power>{_POWER}) | \s*/\s* (?P<below>{_DIGITS}) )? )
    (?! [.,]?\d | \s*(?:[\^*/+=]|-\s*\d) | [\\({{] | [A-Za-z](?![A-Za-z]) )
    (?P<percent> \s*% )?""",
    re.VERBOSE,
)
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.^\\])(?=\S){_NUMBER.pattern}", re.VERBOSE)
_AFTER_NUMBER = 10  # characters behind the last digit that may belong to its number: braces, a percent sign
_UNIT = re.compile(
    r"(?: (?:[A-Za-z]{2,}|[mgshlLNJWV])(?:\^?\{?-?[1-4]\}?)?(?:[ /][A-Za-z]+(?:\^?\{?-?[1-4]\}?)?){0,3})?"
)
_SUPERSCRIPT = re.compile("10([\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)")
FROM_SUPERSCRIPT = str.maketrans(
    "\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "+-0123456789"
)
_REPETEND = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))|(\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?))"
)
_STYLE = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_REPLACED = (
    ("\u2212", "-"), ("{,}", ","), (",\\! ", ","), ("\\!", ""), ("\\,", ""), ("\\ ", " "), ("~", " "), ("\\$", "$"),
    ("\\%", "%"), ("^{\\circ}", ""), ("^\\circ", ""), ("\u00b0", ""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: `50 %` has value 50 and `percent`; `unit` is the text behind it."""

    value: Fraction
    percent: bool
    unit: str

    @property
    def key(self) -> str:
        """The same text for numbers that are written differently: 0.50, 1/2 and 50 %; units are left out.

        A percentage is its hundredth part: 50 % and 50 are two answers, though a label may accept both.
        """
        return str(self.value / 100 if self.percent else self.value)


def parse_number(text: str) -> Number | None:
    """Return the number that the whole text is, with at most a unit behind it; None if it is anything else."""
    cleaned = _clean(text)
    match = _NUMBER.match(cleaned)
    if match is None:
        return None
    rest = cleaned[match.end() :].rstrip(" .")
    return _number(match, unit=rest.strip()) if _UNIT.fullmatch(rest) else None


def leading_number(text: str) -> Number | None:
    """Return the number that the text begins with, whatever words follow it; None if it begins with anything else."""
    match = _NUMBER.match(_clean(text))
    return None if match is None else _number(match, unit="")


def without_repetend(text: str) -> str:
    r"""Return the text with repeating decimals, `0.1\overline{6}` or `0.1\dot{6}`, as fractions."""
    return _REPETEND.sub(_fraction_of_repetend, text)


def _fraction_of_repetend(match: re.Match[str]) -> str:
    whole, before, *written = match.groups(default="")
    repetend = re.sub(r"\D", "", "".join(written))
    shown = int(whole + before + repetend) - int(whole + before or "0")
    return rf"\frac{{{shown}}}{{{'9' * len(repetend)}{'0' * len(before)}}}"


def last_number(text: str) -> str | None:
    """Return the last number in a text as it is written there, sign, fraction and percent sign included."""
    end = max(map(text.rfind, "0123456789")) + 1
    start = max(end - MAX_NUMBER_LENGTH + _AFTER_NUMBER, 0)
    if end == 0 or (start > 0 and text[start].isdigit() and text[start - 1].isdigit()):
        return None  # no number, or one that is too long
    cleaned = _clean(text[start:end] + text[end : end + _AFTER_NUMBER])
    found = [match[0].strip() for match in _NUMBER_IN_TEXT.finditer(cleaned)]
    return found[-1] if found else None


def same_number(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal.

    Units are compared if both have one. A percentage equals the bare number before the sign as well as the hundredth
    part of it, because labels are written both ways; two percentages are compared as written.
    """
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.percent == other.percent:
        return one.value == other.value
    percentage, bare = (one, other) if one.percent else (other, one)
    return bare.value in (percentage.value, percentage.value / 100)


def _clean(text: str) -> str:
    """Return the text without typesetting around and inside numbers; empty if it is too long to be one."""
    text = text.strip()
    if len(text) > MAX_NUMBER_LENGTH:
        return ""
    text = _STYLE.sub(r" \1 ", without_repetend(text)).replace(" ^", "^")  # of a unit, as in \text{ m/s}^2
    text = _SUPERSCRIPT.sub(lambda match: f"10^{{{match[1].translate(FROM_SUPERSCRIPT)}}}", text)
    for written, plain in _REPLACED:
        text = text.replace(written, plain)
    text = " ".join(text.split()).strip("* ")
    return text.removeprefix("\\(").removesuffix("\\)").rstrip("$. ").strip()


def _number(match: re.Match[str], *, unit: str) -> Number | None:
    above, below = (match["whole"], match["below"] or "1") if match["whole"] else (match["above"], match["under"])
    numerator, denominator = (
        Fraction((part or "1").strip("{} ").replace(",", "").rstrip(".")) for part in (above, below)
    )
    signs = match["sign"] + match["sign_after"]  # -$5 and $-5
    mixed = int(match["mixed"] or 0)
    if denominator == 0 or len(signs) > 1 or (mixed and not 0 <= numerator < denominator):
        return None
    value = (mixed + numerator / denominator) * _power_of_ten(match["bare"] or match["power"])
    return Number(-value if signs == "-" else value, percent=match["percent"] is not None, unit=unit)


def _power_of_ten(written: str | None) -> Fraction:
    """Return the value of a text such as `10^{-19}` or `10**5`, 1 for none."""
    exponent = re.sub(r"[^0-9+-]", "", written[2:]) if written else "0"
    return Fraction(10) ** int(exponent)
