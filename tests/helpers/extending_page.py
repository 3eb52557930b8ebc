"""Code files from docs/extending.md."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCK = re.compile(r"^```python\n# ([\w/]+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page_code(name: str) -> dict[str, Any]:
    """Run the page's code block that starts with the file name. Returns its names."""
    names: dict[str, Any] = {"__name__": Path(name).stem}
    exec(dict(BLOCK.findall(PAGE.read_text()))[name], names)
    return names


def page_file(folder: Path, name: str) -> Path:
    """Write the page's code block that starts with the file name. Returns its path."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    path = folder / name
    path.write_text(blocks[name])
    assert f"{name}:" in PAGE.read_text(), f"the page shows no setting with {name}"
    return path
