"""Modules and identifiers mentioned in module docstrings exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "rlhf_cli"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PATHS = {path.relative_to(ROOT).as_posix() for path in FILES}

_FILE = re.compile(r"(?<![\w:{])((?:\w+/)*\w+\.py)\b")
_LEFT_OUT = re.compile(r"(?:Leaves out|leaves out)[^.]*\.")
_IN_PARENTHESES = re.compile(r"\(((?:\w+(?:, |; | and | for \w+| and \w+)*)+)\)")
_MARKED = re.compile(r"`([a-z_]+(?:/[a-z_]+)*)/?`|\bsee ([a-z]+_[a-z_]+)|\bin ([a-z]+_[a-z_]+)\b")
MEANT = {"file.py", "enable_thinking"}
"""A user's file, and a variable of third-party templates."""


def known_names() -> set[str]:
    """Return the modules, packages and identifiers that the code or its settings use."""
    found = {part for path in PATHS for part in path.removesuffix(".py").split("/")}
    for tree in TREES.values():
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name"):
                if isinstance(value := getattr(node, field, None), str):
                    found.add(value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return found


KNOWN = known_names()


def missing(doc: str) -> list[str]:
    """Return the identifiers in a docstring that do not exist."""
    files = [name for name in _FILE.findall(doc) if name not in MEANT]
    lost = [name for name in files if not any(path == name or path.endswith(f"/{name}") for path in PATHS)]
    words = [word for found in _MARKED.findall(doc) for word in found if word]
    for sentence in _LEFT_OUT.findall(doc):
        for group in _IN_PARENTHESES.findall(sentence):
            words += re.findall(r"[a-z]+(?:_[a-z]+)+", group)
    return lost + [word for word in words if word not in MEANT and not set(word.split("/")) <= KNOWN]


def test_a_name_that_is_gone_is_found():
    assert missing("Leaves out who sits where (placement) and what runs there (worker, role_group).") == ["role_group"]
    assert missing("Reads only; how it looks is report.py and sinks.py.") == ["report.py"]
    assert missing("The rest is in `weight_transfer_shm` and `backends/weight_sync/`.") == ["weight_transfer_shm"]


def test_docstrings_of_modules_name_what_exists():
    faults = {path.name: missing(ast.get_docstring(tree) or "") for path, tree in TREES.items()}
    assert {name: lost for name, lost in faults.items() if lost} == {}
