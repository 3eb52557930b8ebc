"""Parses commands in a shell script without running it.

Variables and arrays assigned in the script are expanded. Conditions are not evaluated, so the last assignment before a
command applies. Other variables stay as text, `$NAME`.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlhf_cli.errors import UsageError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|[<>]&|&?>>?|<)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "?": "?", "a": "\a", "b": "\b"}
_KEYWORDS = frozenset({"then", "do", "else", "elif", "if", "fi", "done", "while", "for", "in", "{", "}", "!", "time"})
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def commands_in(text: str) -> list[list[str]]:
    """Return the commands in a script as lists of words.

    Example: `N=8` and `run n=$N \\` with a further line `x=1  # comment` give `[["run", "n=8", "x=1"]]`.

    Raises:
        UsageError: a quote or a bracket is not closed.
    """
    return list(_Script(text).commands())


def is_open(word: str) -> bool:
    """Return whether a word contains an unresolved variable or a command substitution."""
    return re.search(r"\$[\w{(@*#?]|`", word) is not None


@dataclass(slots=True)
class _Script:
    """Parser state: position, variables assigned so far, and here-documents that start on the next line."""

    text: str
    position: int = 0
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Values by name; a scalar is a list with a single item."""
    waiting: list[tuple[str, list[str]]] = field(default_factory=list)
    """Delimiter and command words for each here-document."""

    def commands(self) -> Iterator[list[str]]:
        words: list[str] = []
        continued = False
        while self.position < len(self.text):
            character = self.text[self.position]
            if self.text.startswith("\\\n", self.position):
                self.position += 2
                continued = True
            elif character in " \t\r":
                self.position += 1
            elif character == "#":
                end = self.text.find("\n", self.position)
                # A comment between continued lines does not end the command: scripts often disable a flag like this.
                self.position = len(self.text) if end < 0 else end + continued
            elif found := _REDIRECTION.match(self.text, self.position):
                self._redirect(found, words)
            elif character in "\n;&|()":
                self.position += 1
                yield from self._finished(words)
                words, continued = [], False
                if character == "\n":
                    self._read_documents()
            else:
                continued = False
                self._word(words)
        yield from self._finished(words)

    def _finished(self, words: list[str]) -> Iterator[list[str]]:
        if words and words[0] not in _DECLARATIONS:
            yield words

    def _redirect(self, found: re.Match[str], words: list[str]) -> None:
        self.position = found.end()
        while self.text[self.position : self.position + 1] in (" ", "\t"):
            self.position += 1
        target = "".join(self._fields(split=False))
        if found[0].startswith("<<") and found[0] != "<<<":
            self.waiting.append((target, words))

    def _read_documents(self) -> None:
        """Skip here-documents. `read NAME <<EOF` assigns the text to a variable."""
        for delimiter, words in self.waiting:
            found = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(self.text, self.position)
            end = found or re.compile(r"\Z").search(self.text, self.position)
            assert end is not None
            body = self.text[self.position : end.start()]
            self.position = end.end()
            if words[:1] == ["read"]:
                lines = [line for line in body.replace("\\\n", "\n").splitlines() if not line.lstrip().startswith("#")]
                inner = _Script("\n".join(lines), variables=self.variables)
                self.variables[words[-1]] = ["".join(inner._quoted(len(inner.text)))]
        self.waiting.clear()

    def _word(self, words: list[str]) -> None:
        """Parse a word and append it, or assign a variable."""
        assignment = _ASSIGNMENT.match(self.text, self.position)
        if assignment and (not words or words[0] in _DECLARATIONS):
            name, added = assignment.groups()
            self.position = assignment.end()
            if self.text.startswith("(", self.position):
                value = self._array()
            else:
                value = ["".join(self._fields(split=False))]
                value = [self.variables.get(name, [""])[0] + value[0]] if added else value
            is_array = self.text[assignment.end() : assignment.end() + 1] == "("
            self.variables[name] = [*self.variables.get(name, []), *value] if added and is_array else value
            return
        words += self._fields(split=True)
        if words and words[0] in _KEYWORDS:
            del words[0]

    def _array(self) -> list[str]:
        """Parse an array, `NAME=( ... )`."""
        self.position += 1
        items: list[str] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == ")":
                self.position += 1
                return items
            if character in " \t\r\n" or self.text.startswith("\\\n", self.position):
                self.position += 1 + (character == "\\")
            elif character == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                items += self._fields(split=True)
        raise UsageError("a bracket is not closed")

    def _fields(self, *, split: bool) -> list[str]:
        """Parse a word. With `split`, unquoted variables are split at spaces, and arrays expand to multiple words."""
        fields, is_empty = [""], True
        start = self.position
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in " \t\r\n;&|<>()" and not (character in "()" and self.position == start):
                break
            self.position += 1
            if character == "\\":
                following = self.text[self.position : self.position + 1]
                self.position += 1
                if following == "\n":
                    self.position -= 2
                    break
                fields[-1] += following
            elif character in "'\"" or self.text.startswith("$'", self.position - 1):
                if quoted := self._literal(character):
                    fields[-1] += quoted[0]
                    fields += quoted[1:]
                    is_empty = False
            elif character == "$" or character == "`":
                items = self._expansion(character)
                texts = [part for item in items for part in (item.split() if split and "$(" not in item else [item])]
                if split and texts:
                    fields[-1] += texts[0]
                    fields += texts[1:]
                elif not split:
                    fields[-1] += " ".join(texts)
            else:
                fields[-1] += character
        return [] if split and is_empty and fields == [""] else fields

    def _literal(self, opening: str) -> list[str]:
        """Parse the rest of a quoted text. Nothing for `"$@"`, because there are no arguments."""
        if opening == "'":
            start, end = self.position, self._find("'")
            self.position = end + 1
            return [self.text[start:end]]
        if opening == "$":
            return [self._escaped()]
        has_arguments = re.compile(r"\$(?:@|\{@\})\"").match(self.text, self.position) is None
        found = self._quoted(None)
        return found if has_arguments else []

    def _escaped(self) -> str:
        """Parse `'text'` after `$`, in which backslashes are escapes as in C."""
        found = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.position)
        if found is None:
            raise UsageError("a quote is not closed")
        self.position = found.end()
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), found[1], flags=re.DOTALL)

    def _quoted(self, end: int | None) -> list[str]:
        """Parse up to the closing quote or `end`. A quoted array expands to multiple items."""
        fields = [""]
        while True:
            if self.position >= (len(self.text) if end is None else end):
                if end is None:
                    raise UsageError("a quote is not closed")
                return fields
            character = self.text[self.position]
            self.position += 1
            if character == '"' and end is None:
                return fields
            if character == "\\" and self.text[self.position : self.position + 1] in ("$", "`", '"', "\\", "\n"):
                fields[-1] += self.text[self.position].strip("\n")
                self.position += 1
            elif character in "$`":
                first, *others = self._expansion(character) or [""]
                fields[-1] += first
                fields += others
            else:
                fields[-1] += character

    def _find(self, closing: str) -> int:
        end = self.text.find(closing, self.position)
        if end < 0:
            raise UsageError("a quote is not closed")
        return end

    def _expansion(self, opening: str) -> list[str]:
        """Expand the parameter or arithmetic after `$`; command substitutions stay as text."""
        start = self.position
        if opening == "`":
            self.position = self._find("`") + 1
            return [f"`{self.text[start : self.position]}"]
        if self.text.startswith("((", start):
            inside = self._brackets("(", ")")[1:-1]
            return [self._arithmetic(inside)]
        if self.text.startswith("(", start):
            return [f"$({self._brackets('(', ')')})"]
        if self.text.startswith("{", start):
            return self._parameter(self._brackets("{", "}"))
        found = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(self.text, start)
        if found is None:
            return ["$"]
        self.position = found.end()
        return [] if found[0] in ("@", "*") else self.variables.get(found[0], [f"${found[0]}"])[:1]

    def _brackets(self, opening: str, closing: str) -> str:
        """Parse a bracket, and return the text inside."""
        start, depth = self.position, 0
        while self.position < len(self.text):
            character = self.text[self.position]
            self.position += 1
            depth += (character == opening) - (character == closing)
            if depth == 0:
                return self.text[start + 1 : self.position - 1]
        raise UsageError("a bracket is not closed")

    def _parameter(self, inside: str) -> list[str]:
        """Expand `${inside}`: a variable or array, optionally with a default or alternative."""
        found = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
        if found is None:
            return [f"${{{inside}}}"]
        name, whole, sign, other = found.groups()
        value = [] if name in ("@", "*") else self.variables.get(name)
        alternative = "".join(_Script(other or "", variables=self.variables)._quoted(len(other or "")))
        if sign and "+" in sign:
            return [alternative] if value else []
        if sign and "?" not in sign and not (value and value != [""]):
            return [alternative.strip("\"'")]
        if value is None:
            return [] if whole else [f"${{{inside}}}"]
        return value if whole else value[:1]

    def _arithmetic(self, inside: str) -> str:
        text = "".join(_Script(inside, variables=self.variables)._quoted(len(inside)))
        named = re.sub(r"[A-Za-z_]\w*", lambda found: self.variables.get(found[0], [found[0]])[0], text)
        try:
            return str(_computed(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError):
            return f"$(({inside}))"


def _computed(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return int(_OPERATORS[type(sign)](_computed(left), _computed(right)))
    raise ValueError("not a number")
