"""Files of the front end, which `rlhf view` serves and report.html contains."""

import base64
import re
from hashlib import sha256
from pathlib import Path

PAGE = Path(__file__).with_name("page")
SHELL = "index.html"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


def files() -> dict[str, Path]:
    """Return the files by name."""
    return {path.name: path for path in PAGE.rglob("*") if path.suffix in TYPES}


def content_security_policy(page: str, source: str) -> str:
    """Allow files from a source, and the hash of the page's import map, which cannot be a file."""
    (imports,) = _IMPORT_MAP.findall(page)
    digest = base64.b64encode(sha256(imports.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src {source} 'sha256-{digest}'; style-src {source}; img-src {source}; "
        "base-uri 'none'; form-action 'none'"
    )
