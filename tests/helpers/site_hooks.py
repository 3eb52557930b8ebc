"""Documentation site hooks, and metrics documented on its pages."""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"


def site_hooks() -> Any:
    """Return the module docs/hooks.py."""
    spec = importlib.util.spec_from_file_location("site_hooks_of_docs", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undocumented(command: str, names: Iterable[str]) -> list[str]:
    """Return the metrics missing on the command's page."""
    # The pattern is for estimators from outside: each number of a built-in one has its own entry.
    documented = [name for metric in site_hooks().metrics_of(command) if (name := metric["name"]) != "advantage/<name>"]
    patterns = [re.compile(re.sub(r"<[^>]*>", ".+", re.escape(name))) for name in documented]
    return sorted(name for name in set(names) if not any(pattern.fullmatch(name) for pattern in patterns))
