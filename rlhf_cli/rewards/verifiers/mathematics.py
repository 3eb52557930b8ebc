r"""The `math` verifier: numbers, formulas, tuples, sets, intervals and equations.

Numbers are compared by number_parsing.py, lists element by element, equations by both sides, and units with each other.
Remaining formulas are parsed by math-verify, which uses a LaTeX grammar and never evaluates code:

- Two constants are compared here, exactly. math-verify's comparison has absolute tolerances, so all small numbers would
  be equal.
- Other formulas are compared by math-verify. The timeouts in math-verify are off, because they use signals; the pool
  kills a slow worker.
- Formulas with too many digits (formula_size.py) are equal only if they are written alike.
"""

import logging
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.evalf import PrecisionExhausted

from rlhf_cli.rewards.verifiers.answers import label_answer, tagged_answer
from rlhf_cli.rewards.verifiers.builtin import NO_LABEL, Verdict, short
from rlhf_cli.rewards.verifiers.formula_size import is_too_large
from rlhf_cli.rewards.verifiers.number_parsing import (
    FROM_SUPERSCRIPT,
    MAX_NUMBER_LENGTH,
    last_number,
    parse_number,
    same_number,
    without_repetend,
)

# math-verify warns on each call that timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Longest answer, in characters, to parse as a formula. Longer answers must be equal as text.
_MAX_FORMULA_LENGTH = MAX_NUMBER_LENGTH

# Precision for comparing irrational numbers.
_DIGITS = 100
# Significant digits that a decimal needs to equal an irrational number: 3.14 is not pi, 3.14159 is.
_LEAST_DIGITS = 6
# Deepest nesting of brackets in a formula. The grammar needs up to half a second for each level.
_DEEPEST = 16

_FORMULA = [LatexExtractionConfig()]
_IN_SENTENCE = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)", re.DOTALL)
_SENTENCE = re.compile(r"\b[A-Za-z]{2,}[ ,:]+[A-Za-z]{2}")
_WRAPPED = re.compile(r"\$+([^$]*)\$+|\\\((.*)\\\)|\\\[(.*)\\\]|\*\*([^*]+)\*\*", re.DOTALL)
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_NOISE = re.compile(r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[!,;: $]|\$|\^\s*\{?\\circ\}?|\{,\}")
_OF_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?)\s*(?:\\left)?[({]?\s*(-?\d+(?:\.\d+)?)\s*"
    r"(?:\^\s*\{?\\circ\}?|\u00b0)\s*(?:\\right)?[)}]?"
)
_LONG_EXPONENT = re.compile(r"\^\s*([+-]\d+|\d{2,})")
_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u2264": r"\le ", "\u2265": r"\ge ",
     "\u222a": r"\cup ", "\u2208": r"\in ", "\u211d": r"\mathbb{R}", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
     "\u00f7": "/", "\u00b1": r"\pm ", "\u00bc": r"\frac{1}{4}", "\u00bd": r"\frac{1}{2}", "\u00be": r"\frac{3}{4}"}
)  # fmt: skip
# An en dash is a minus sign, except between numbers, where it denotes a range.
_DASH = re.compile("(?<![\\w)}])\u2013")
_ROOT_SIGN = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-z]))")
_RAISED = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNIT = re.compile(
    r"(?<=[\w})\]])(?:\s|\\[,; ]|~)*\\(?:text|mathrm|mbox)\s*\{\s*([A-Za-z][A-Za-z ./]*)\}(?:\^\{?-?\d\}?)?$"
)
_NAME = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?"
_SYMBOL = re.compile(rf"{_NAME}|\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\)")
# May denote an interval without listing both ends.
_ONE_SIDED = re.compile(r"[<>]|\\(?:[lg](?:t|eq?|eqslant)|mathbb)(?![a-z])|[\u2264\u2265\u211d]")
_EQUALS = re.compile(r"=|\\in(?![a-z])")
_TOKEN = re.compile(r"\\[{}]|\\.|[()\[\]{}]|(?P<separator>\s*[,;]\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+)", re.DOTALL)
_OPENING, _CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_EMPTY_SET = re.compile(r"\\varnothing(?![a-z])|\\\{\s*\\\}|\u2205")
# Unordered comparison takes quadratic time, and each comparison may need algebra.
_LONGEST_SET = 16


def math(response: str, label: str | None) -> Verdict:
    r"""Compare the answer in a response with the label.

    The answer is the last balanced `\boxed{}` or the last `<answer>..</answer>`, whichever begins later, or else the
    last number. The label is an answer, or a solution with the answer in the last box or after `####`.
    """
    if label is None:
        return NO_LABEL
    expected = label_answer(label)
    if not expected:
        return Verdict("failed", f"label {short(label)!r} has no answer")
    answer = find_answer(response)
    if not answer:
        return Verdict("invalid", r"no \boxed{}, no <answer> and no number in the response")
    number = parse_number(answer)
    key = _plain(answer) if number is None else number.key
    return Verdict("correct" if same_answer(answer, expected) else "wrong", short(answer), key)


def find_answer(response: str) -> str | None:
    """Extract the answer as written, or None."""
    tagged = tagged_answer(response)
    if tagged is None:
        return last_number(response)
    content, is_boxed = tagged
    return content if is_boxed else _core(content)


def same_answer(one: str, other: str) -> bool:
    """Return whether two answers are equivalent.

    Compares numbers and text first, then again without units and without names such as `x =`. If that is inconclusive,
    lists are compared element by element and single elements as formulas.
    """
    while (verdict := _settled(one, other)) is None:
        simpler = _simpler(one, other)
        if simpler is None:
            lists = product(_readings(_plain(one)), _readings(_plain(other)))
            return any(_same_lists(*pair) for pair in lists)
        one, other = simpler
    return verdict


def _settled(one: str, other: str) -> bool | None:
    """Compare two answers by numbers, text, length and units. Returns None if that is inconclusive."""
    number, other_number = parse_number(one), parse_number(other)
    if number is not None and other_number is not None:
        return same_number(number, other_number)
    left, right = _plain(one), _plain(other)
    if left == right:
        return True
    if max(len(left), len(right)) > _MAX_FORMULA_LENGTH:
        return False
    units = {unit for _, unit in (_without_unit(one), _without_unit(other)) if unit}
    return False if len(units) == 2 else None


def _simpler(one: str, other: str) -> tuple[str, str] | None:
    """Strip units or, if there are none, names such as `x =`. Returns None if there is nothing to strip."""
    values = _without_unit(one)[0], _without_unit(other)[0]
    if values != (one, other):
        return values
    plain = _plain(one), _plain(other)
    values = _without_names(*plain)
    return None if values == plain else values


class _List(NamedTuple):
    """An answer split at commas. Brackets are empty unless they enclose the whole answer."""

    opening: str
    parts: list[str]
    closing: str


def _same_lists(one: _List, other: _List) -> bool:
    sizes = {len(one.parts), len(other.parts)}
    is_set = one.opening == other.opening == r"\{"
    if sizes == {1} or (sizes == {1, 2} and any(_ONE_SIDED.search(side.parts[0]) for side in (one, other))):
        return _same_formula(*(side.opening + ", ".join(side.parts) + side.closing for side in (one, other)))
    has_two_signs = r"\pm" in "".join(one.parts + other.parts)
    if len(sizes) == 2 and not has_two_signs:
        return is_set and max(sizes) <= _LONGEST_SET and _same_sets(one.parts, other.parts)
    brackets = [(side.opening, side.closing) for side in (one, other) if side.opening]
    if len(brackets) == 2 and brackets[0] != brackets[1]:
        return False
    if len(sizes) == 2:
        return _same_formula(",".join(one.parts), ",".join(other.parts))
    if any(opening != r"\{" for opening, _ in brackets) or len(one.parts) > _LONGEST_SET:
        return all(same_answer(*pair) for pair in zip(one.parts, other.parts, strict=True))
    return _same_members(one.parts, other.parts)


def _same_sets(one: list[str], other: list[str]) -> bool:
    """Compare as sets: each element must occur in the other list. Duplicates are allowed."""
    equal = [[same_answer(left, right) for right in other] for left in one]
    return all(map(any, equal)) and all(map(any, zip(*equal, strict=True)))


def _same_members(one: list[str], other: list[str]) -> bool:
    """Compare as multisets: a one-to-one match in any order."""
    left = list(other)
    for part in one:
        equal = next((candidate for candidate in left if same_answer(part, candidate)), None)
        if equal is None:
            return False
        left.remove(equal)
    return True


def _same_formula(answer: str, expected: str) -> bool:
    parsed = [_parsed(text) for text in (expected, answer)]
    if not all(parsed):
        return False
    if any(is_too_large(form) for forms in parsed for form in forms):
        return bool(parsed[0][0] == parsed[1][0])
    parsed = [[_with_exact_numbers(form) for form in forms] for forms in parsed]
    constants = [_constant(forms[0]) for forms in parsed]
    if constants[0] is None or constants[1] is None:
        precise = {"numeric_precision": _DIGITS, "allow_set_relation_comp": True}
        return bool(verify(*parsed, timeout_seconds=None, **precise))
    return _same_constant(constants[0], expected, constants[1], answer)


def _parsed(text: str) -> list[object]:
    """Parse a formula. Returns an empty list if it cannot be parsed."""
    # Plain numbers bypass math-verify, which parses the e in 1e-20 as Euler's number.
    number = parse_number(text)
    if number is not None and not number.percent and not number.unit:
        return [sympy.Rational(number.value.numerator, number.value.denominator), text]
    if max((depth for _, depth in _tokens(text)), default=0) > _DEEPEST:
        return []
    return list(
        parse(f"${text}$", _FORMULA, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    )


def _with_exact_numbers(form: object) -> object:
    """Replace decimals by fractions, so that nothing is rounded, and the symbol `i` by the imaginary unit."""
    if not isinstance(form, sympy.Basic):
        return form
    exact: sympy.Basic = form.subs({symbol: sympy.I for symbol in form.free_symbols if symbol.name == "i"})
    if not exact.has(sympy.Float):
        return exact
    return exact.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))


def _constant(form: object) -> sympy.Expr | None:
    """Evaluate a formula and return it if the value is a finite number, or else None."""
    if not isinstance(form, sympy.Expr) or form.free_symbols or form.has(sympy.UnevaluatedExpr):
        return None
    value = form.doit()
    return value if value.is_Rational or (value.is_number and value.evalf(_DIGITS).is_finite) else None


def _same_constant(one: sympy.Expr, text: str, other: sympy.Expr, other_text: str) -> bool:
    """Compare two constants.

    Rational numbers are compared exactly, others to 100 digits. A decimal with at least six significant digits equals
    an irrational number that rounds or truncates to it.
    """
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    # 20 guard digits; `maxn` stops sympy from raising the precision without bound when terms cancel.
    values = [side.evalf(_DIGITS + 20, maxn=4 * _DIGITS) for side in (one, other)]
    size = max(map(abs, values))
    if abs(values[0] - values[1]) <= size * sympy.Float(10) ** -_DIGITS:
        return True
    # Relative precision is meaningless this close to 0: both must be 0.
    if size < sympy.Float(10) ** (-3 * _DIGITS):
        return _is_nothing(one) and _is_nothing(other)
    return (one.is_Rational and "." in text and _is_rounded(one, values[1])) or (
        other.is_Rational and "." in other_text and _is_rounded(other, values[0])
    )


def _is_nothing(number: sympy.Expr) -> bool:
    """Return whether a number is 0, or cancels to so many digits that it must be."""
    try:
        return bool(number.evalf(_LEAST_DIGITS, maxn=4 * _DIGITS, strict=True) == 0)
    except PrecisionExhausted:
        return True


def _is_rounded(decimal: sympy.Expr, value: sympy.Expr) -> bool:
    """Return whether a decimal with six or more significant digits is `value`, rounded or truncated."""
    digits, places = sympy.Integer(decimal.p), 0
    denominator = sympy.Integer(decimal.q)
    while denominator != 1 and places < MAX_NUMBER_LENGTH:
        digits, places = digits * 10, places + 1
        common = sympy.gcd(digits, denominator)
        digits, denominator = digits / common, denominator / common
    if denominator != 1 or abs(digits) < 10 ** (_LEAST_DIGITS - 1) or not value.is_real:
        return False
    # In units in the last place.
    excess = (abs(value) - abs(decimal)) * sympy.Integer(10) ** places
    return bool(value * decimal > 0 and -0.5 <= excess < 1)


def _core(text: str) -> str:
    """Return the part of an `<answer>` to compare: the last formula or else number in a sentence, otherwise all."""
    if parse_number(text) is not None or _SENTENCE.search(text) is None:
        return text
    formulas = _IN_SENTENCE.findall(text[-_MAX_FORMULA_LENGTH:])
    return "".join(formulas[-1]) if formulas else last_number(text) or text


def _plain(text: str) -> str:
    """Remove LaTeX typesetting for a text comparison."""
    text = text.strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = next(filter(None, wrapped.groups()), "")
    text = _OF_DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", _DASH.sub("-", without_repetend(text)))
    text = _NOISE.sub("", _FRACTION.sub(r"\\frac", _STYLE.sub(r"\1", text)))
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(FROM_SUPERSCRIPT)}}}", text)
    text = _ROOT_SIGN.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text).translate(_CHARACTERS)
    text = _LONG_EXPONENT.sub(r"^{\1}", _EMPTY_SET.sub(r"\\emptyset", text)).replace(r"\%", "%").strip().rstrip(".")
    # Words are compared case-insensitively; in formulas, x and X differ.
    if not re.search(r"[\\=+*/^_]", text):
        text = text.casefold()
    return _with_blanks_after_commas(" ".join(text.split()))


def _with_blanks_after_commas(text: str) -> str:
    """Put one space after each comma inside brackets, because math-verify parses (1,100) as 1100."""
    pieces, end = [], 0
    for match, depth in _tokens(text):
        is_inner_comma = depth > 0 and match[0].strip() == ","
        pieces += [text[end : match.start()], ", " if is_inner_comma else match[0]]
        end = match.end()
    return "".join(pieces) + text[end:]


def _without_unit(text: str) -> tuple[str, str]:
    """Split off a trailing unit in \\text{}: returns (text, unit)."""
    text = text.strip().rstrip(".")
    match = _UNIT.search(text)
    return (text[: match.start()], match[0].strip()) if match else (text, "")


def _readings(text: str) -> list[_List]:
    """Return all readings as a list: `1,100` is one number, or two."""
    whole_numbers = _THOUSANDS.sub("", text)
    texts = [text] if any(_around(text)) or whole_numbers == text else [_joined_thousands(text), text]
    return [_list_of(reading) for reading in texts]


def _joined_thousands(text: str) -> str:
    """Remove thousands separators, except inside brackets, where a comma separates elements."""
    inner = {match.start() for match, depth in _tokens(text) if depth > 0}
    return _THOUSANDS.sub(lambda match: match[0] if match.start() in inner else "", text)


def _list_of(text: str) -> _List:
    """Split a text at top-level commas, `and` and `or`, after removing brackets around the whole text."""
    opening, closing = _around(text)
    inner = text[len(opening) : len(text) - len(closing)]
    parts, start = [], 0
    for match, depth in _tokens(inner):
        if depth == 0 and match["separator"]:
            parts.append(inner[start : match.start()].strip())
            start = match.end()
    parts.append(inner[start:].strip())
    return _List(opening, [part for part in parts if part] or [""], closing)


def _tokens(text: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield each bracket and separator with the nesting depth after it."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        yield match, depth


def _around(text: str) -> tuple[str, str]:
    """Return the brackets that enclose the whole text, or empty strings."""
    opening = next((bracket for bracket in ("(", "[", r"\{") if text.startswith(bracket)), "")
    closing = next((bracket for bracket in (r"\}", ")", "]") if text.endswith(bracket)), "")
    if not opening or not closing:
        return "", ""
    for match, depth in _tokens(text):
        if depth == 0:
            return (opening, closing) if match.end() == len(text) else ("", "")
    return "", ""


def _without_names(one: str, other: str) -> tuple[str, str]:
    """Strip `x =` from two answers if both have the same name or only one has a name."""
    (name, value), (other_name, other_value) = _assigned(one), _assigned(other)
    if name == other_name or (not (name and other_name) and not _EQUALS.search(value + other_value)):
        return value, other_value
    return one, other


def _assigned(text: str) -> tuple[str, str]:
    """Split `x = value` into (symbol, value). The symbol is empty if the text is not an assignment."""
    name, *values = _EQUALS.split(text)
    if len(values) == 1 and _SYMBOL.fullmatch(name.strip()):
        return name.strip(), values[0].strip()
    return "", text
