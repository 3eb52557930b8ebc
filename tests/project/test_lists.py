"""Lists of commands and estimators are derived from the tables instead of being repeated by hand."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.command_table import TRAINING
from rlhf_cli.config.roles import ROLES

ROOT = Path(__file__).parents[2] / "rlhf_cli"
TABLES = {
    "command_table.py": TRAINING,
    "algorithms/estimators/table.py": tuple(ESTIMATORS),
    "config/roles.py": tuple(ROLES),
}
"""The names of each table, by module; `TRAINING` for commands."""
ENOUGH = 3
"""Number of names that makes a list; two may occur together by chance."""
ALLOWED = {
    "config/inspection.py": "help texts of `rlhf data` about single settings, which are constants",
    "data/formats/marks.py": "the commands that leave marked text out of the loss",
    "runs/data_settings.py": "a table: the data settings of each command",
}


def lists(source: str, table: tuple[str, ...] = TRAINING) -> Iterator[tuple[int, list[str]]]:
    """Yield line and names of each collection or phrase with at least `ENOUGH` names of a table.

    Docstrings of modules, classes and functions are prose. Those of fields are help texts.
    """
    tree = ast.parse(source)
    holders = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    prose = {node.body[0].value for node in holders if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant() if node in prose:
                continue
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) | ast.Dict(keys=items):
                names = [item.value for item in items if isinstance(item, ast.Constant) and item.value in table]
            case ast.Constant(value=str(text)):
                names = phrase(text, table)
            case _:
                continue
        if len(set(names)) >= ENOUGH:
            yield node.lineno, names


def phrase(text: str, table: tuple[str, ...]) -> list[str]:
    """Return the first `ENOUGH` or more names that are separated only by commas, "and" or "or"."""
    name = rf"(?:rlhf )?(?:{'|'.join(sorted(map(re.escape, table), key=len, reverse=True))})(?![\w+-])"
    found = re.search(rf"(?<![\w+-]){name}(?:(?:, (?:and |or )?| and | or |/){name}){{{ENOUGH - 1},}}", text)
    return re.findall(name, found[0]) if found else []


@pytest.mark.parametrize(
    "path", sorted(set(ROOT.rglob("*.py")) - {ROOT / name for name in TABLES}), ids=lambda path: path.name
)
def test_a_module_lists_no_names_of_a_table_by_hand(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = {name: listed for name, table in TABLES.items() if (listed := list(lists(source, table)))}
    if path.relative_to(ROOT).as_posix() in ALLOWED:
        assert found, "remove it from ALLOWED"
    else:
        assert not found, f"derive the list from its table: {found}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("NAMES = ('ppo', 'grpo', 'rloo')", ["ppo", "grpo", "rloo"]),
        ("TABLE = {'sft': 1, 'dpo': 2, 'kto': 3}", ["sft", "dpo", "kto"]),
        ("raise ValueError('give it to rlhf ppo, reinforce++ or remax')", ["rlhf ppo", "reinforce++", "remax"]),
        ("PAIR = ['ppo', 'grpo', 'generate']", []),
        ("text = 'ppo, or grpo-like rloo'", []),
        ("class A:\n    'Like ppo, grpo and rloo.'", []),
        ("class A:\n    b: int\n    'Only for ppo, grpo and rloo.'", ["ppo", "grpo", "rloo"]),
    ],
)
def test_lists_are_found_in_collections_and_phrases(source: str, expected: list[str]) -> None:
    assert [names for _, names in lists(source)] == ([expected] if expected else [])
