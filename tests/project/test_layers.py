"""Modules may import only from lower layers. Add a new module to the row it belongs to."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rlhf_cli"
ROWS = [
    {
        "algorithms",
        "command_table",
        "commands",
        "config",
        "flags",
        "foreign",
        "code_settings",
        "options",
        "settings_file",
        "help_page",
        "errors",
        "environment",
        "event_loop",
        "version",
    },
    {"models"},
    {"agents", "data", "rewards", "tracking"},
    {"backends"},
    {"planning", "trainers"},
    {"runs"},
    {"__init__", "__main__", "api", "cli"},
]
RANK = {member: rank for rank, row in enumerate(ROWS) for member in row}
BACKEND_PACKAGES = {"ray", "deepspeed", "vllm"}  # only backends/ may import these
HEAVY = BACKEND_PACKAGES | {"torch", "transformers", "datasets", "peft", "pandas", "numpy"}
LIGHT_ROWS = {0, 6}  # imported by `--help`: nothing heavy at module level
HEAVY_PART = "algorithms/", "algorithms/estimators/"  # of these rows: the first folder without the second
PURE = {"torch", "pydantic", "rlhf_cli"}  # allowed imports of algorithms/ in addition to the standard library


def imported(tree: ast.AST) -> set[str]:
    """Return the full names of all imported modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_on_load(tree: ast.Module) -> set[str]:
    """Return the imported modules without imports in functions and under `if TYPE_CHECKING`."""
    names = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= imported(node)
        nodes += ast.iter_child_nodes(node)
    return names


def offences(name: str, source: str) -> list[str]:
    """Return the rules that a module breaks; `name` is its path in the package, such as 'trainers/offline/loop.py'."""
    member = name.split("/")[0].removesuffix(".py")
    tree = ast.parse(source)
    everywhere = imported(tree)
    own = {n.split(".")[1] for n in everywhere if n.startswith("rlhf_cli.")} & RANK.keys()
    top = {n.split(".")[0] for n in everywhere}
    found = [f"{name} imports {other}, which is above it" for other in sorted(own) if RANK[other] > RANK[member]]
    if member == "trainers" and "backends" in own:
        found.append(f"{name} imports backends: pass the object in instead")
    if member != "backends":
        found += [f"{name} imports {package}: only backends/ does" for package in sorted(top & BACKEND_PACKAGES)]
    if RANK[member] in LIGHT_ROWS and (not name.startswith(HEAVY_PART[0]) or name.startswith(HEAVY_PART[1])):
        on_load = {n.split(".")[0] for n in imported_on_load(tree)}
        found += [f"{name} imports {package} at module level" for package in sorted(on_load & HEAVY)]
    return found


def sources() -> list[tuple[str, str]]:
    return [(str(path.relative_to(PACKAGE)), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


def test_every_module_has_a_row():
    strangers = {name.split("/")[0].removesuffix(".py") for name, _ in sources()} - RANK.keys()
    assert not strangers, f"add {strangers} to the row of tests/project/test_layers.py it belongs to"


def test_imports_point_down():
    assert [offence for name, source in sources() for offence in offences(name, source)] == []


def imports_of_modules(named_sources: list[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the package modules that each module imports, by full name such as 'rlhf_cli.trainers.offline.loop'."""
    trees = {"rlhf_cli." + name.removesuffix(".py").replace("/", "."): ast.parse(text) for name, text in named_sources}
    return {name: (imported(tree) & trees.keys()) - {name} for name, tree in trees.items()}


def test_no_module_imports_itself_by_way_of_others():
    graph = imports_of_modules(sources())
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_a_circle_of_imports_is_found_inside_functions_too():
    graph = imports_of_modules(
        [("a/x.py", "from rlhf_cli.b import y"), ("b/y.py", "def f():\n    from rlhf_cli.a.x import g")]
    )
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


PRIVATE = re.compile(
    r"\b(?:torch|transformers|vllm|ray|deepspeed|peft|datasets)(?:\.\w+)*\._(?!_)\w+"
    r"|config\._attn_\w+|import _(?!_)\w+"
)


def private_uses(source: str) -> list[str]:
    """Return the private names of libraries that a module uses."""
    return PRIVATE.findall(source)


def test_private_functions_of_libraries_are_used_in_one_module():
    assert {name for name, source in sources() if private_uses(source)} == {"models/compat.py"}


def test_algorithms_import_torch_and_settings_and_nothing_else():
    import sys

    allowed = PURE | sys.stdlib_module_names
    for path in sorted((PACKAGE / "algorithms").rglob("*.py")):
        others = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))} - allowed
        assert not others, f"{path.name} imports {others}"


@pytest.mark.parametrize(
    ("name", "source", "offence"),
    [
        ("models/loading.py", "from rlhf_cli.data.packing.packs import Pack", "models/loading.py imports data"),
        (
            "models/loading.py",
            "def f():\n    import rlhf_cli.trainers.offline.loop",
            "models/loading.py imports trainers",
        ),
        (
            "trainers/offline/loop.py",
            "from rlhf_cli import backends",
            "trainers/offline/loop.py imports backends: pass",
        ),
        ("data/reading/sources.py", "def f():\n    import ray", "data/reading/sources.py imports ray: only"),
        ("commands/sft.py", "import torch.nn", "commands/sft.py imports torch at module level"),
        (
            "algorithms/estimators/a.py",
            "import torch",
            "algorithms/estimators/a.py imports torch at module level",
        ),
        ("config/data.py", "class A:\n    from numpy import array", "config/data.py imports numpy at module level"),
        (
            "cli.py",
            "try:\n    import datasets\nexcept ImportError:\n    pass",
            "cli.py imports datasets at module level",
        ),
    ],
)
def test_an_import_against_the_rules_is_named(name, source, offence):
    assert any(found.startswith(offence) for found in offences(name, source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cli.py", "def sft(config):\n    import torch\n    from rlhf_cli.backends import ray_cluster"),
        ("backends/roles/worker.py", "import ray"),
        ("algorithms/groups.py", "import torch"),
        ("commands/sft.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ],
)
def test_an_import_within_the_rules_passes(name, source):
    assert offences(name, source) == []
