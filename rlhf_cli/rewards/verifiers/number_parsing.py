"""Exact parsing and comparison for plain numbers in text.

Supports signs, thousands separators, decimals, repeating decimals, powers of ten in all spellings, fractions, mixed
numbers, percentages, currency signs and a trailing unit. Model output is matched, never evaluated, in linear time.
Algebra is in mathematics.py.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

# Longest number that is parsed, in characters. No real answer is longer, and arithmetic on such numbers takes
# microseconds. Python itself rejects integer strings with more than 4,300 digits.
MAX_NUMBER_LENGTH = 1_000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?![\d.]))?"
# Exponents have at most 3 digits, so that values stay below Python's limit of 4,300 digits for int-to-str conversion.
# The letter x also counts as a multiplication sign.
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
# Characters after the last digit that may belong to the number, such as braces and a percent sign.
_AFTER_NUMBER = 10
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
    """A number as written: `50 %` has value 50 with `percent`. `unit` is the text after it."""

    value: Fraction
    percent: bool
    unit: str

    @property
    def key(self) -> str:
        """Canonical string without the unit, equal for 0.50, 1/2 and 50 %.

        A percentage is divided by 100: 50 % and 50 are different answers, although a label may accept both.
        """
        return str(self.value / 100 if self.percent else self.value)


def parse_number(text: str) -> Number | None:
    """Parse a text that consists of a number and an optional unit. Returns None for other text."""
    cleaned = _clean(text)
    match = _NUMBER.match(cleaned)
    if match is None:
        return None
    rest = cleaned[match.end() :].rstrip(" .")
    return _number(match, unit=rest.strip()) if _UNIT.fullmatch(rest) else None


def leading_number(text: str) -> Number | None:
    """Parse a number at the start of a text, ignoring words after it. Returns None if there is none."""
    match = _NUMBER.match(_clean(text))
    return None if match is None else _number(match, unit="")


def without_repetend(text: str) -> str:
    r"""Replace repeating decimals, `0.1\overline{6}` or `0.1\dot{6}`, by fractions."""
    return _REPETEND.sub(_fraction_of_repetend, text)


def _fraction_of_repetend(match: re.Match[str]) -> str:
    whole, before, *written = match.groups(default="")
    repetend = re.sub(r"\D", "", "".join(written))
    shown = int(whole + before + repetend) - int(whole + before or "0")
    return rf"\frac{{{shown}}}{{{'9' * len(repetend)}{'0' * len(before)}}}"


def last_number(text: str) -> str | None:
    """Return the last number as written, including sign, fraction and percent sign."""
    # Search only near the last digit, so that the time does not depend on the text length.
    end = max(map(text.rfind, "0123456789")) + 1
    start = max(end - MAX_NUMBER_LENGTH + _AFTER_NUMBER, 0)
    # No digit, or a number that is too long: a part of it would be a wrong answer.
    if end == 0 or (start > 0 and text[start].isdigit() and text[start - 1].isdigit()):
        return None
    cleaned = _clean(text[start:end] + text[end : end + _AFTER_NUMBER])
    matches = [match[0].strip() for match in _NUMBER_IN_TEXT.finditer(cleaned)]
    return matches[-1] if matches else None


def same_number(one: Number, other: Number) -> bool:
    """Return whether two numbers are equal.

    Units are compared if both numbers have one. 50 % equals 50 as well as 0.5, because labels use both notations; two
    percentages are compared as written.
    """
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if one.percent == other.percent:
        return one.value == other.value
    percentage, bare = (one, other) if one.percent else (other, one)
    return bare.value in (percentage.value, percentage.value / 100)


def _clean(text: str) -> str:
    """Remove typesetting around and inside numbers. Returns "" if the text is too long."""
    text = text.strip()
    if len(text) > MAX_NUMBER_LENGTH:
        return ""
    # The space before ^ comes from a styled unit: \text{ m/s}^2.
    text = _STYLE.sub(r" \1 ", without_repetend(text)).replace(" ^", "^")
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
    # A sign may precede or follow the currency sign, but not both: -$5 and $-5.
    signs = match["sign"] + match["sign_after"]
    mixed = int(match["mixed"] or 0)
    if denominator == 0 or len(signs) > 1 or (mixed and not 0 <= numerator < denominator):
        return None
    value = (mixed + numerator / denominator) * _power_of_ten(match["bare"] or match["power"])
    return Number(-value if signs == "-" else value, percent=match["percent"] is not None, unit=unit)


def _power_of_ten(written: str | None) -> Fraction:
    """Parse a power such as `10^{-19}` or `10**5`. Returns 1 for None."""
    exponent = re.sub(r"[^0-9+-]", "", written[2:]) if written else "0"
    return Fraction(10) ** int(exponent)
