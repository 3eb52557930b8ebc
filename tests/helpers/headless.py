"""A headless Chromium for tests of pages, driven over its debugging protocol."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_core_python
from aiohttp import ClientSession, WSMsgType

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_START_SECONDS = 60
_STEP_SECONDS = 0.05


class Page:
    """A tab. `problems` are exceptions and errors on its console, `requests` the addresses that it loaded."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._count = 0
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive(timeout=_START_SECONDS)
            assert message.type == WSMsgType.TEXT, message
            found = json.loads(message.data)
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(values["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])

    async def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Open an address."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Return the value of an expression."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true and return its value."""
        end = time.monotonic() + seconds
        while True:
            found = await self.value(script)
            if found:
                return found
            assert time.monotonic() < end, f"{script} stays {found}; {self.problems}"
            await self.value(f"new Promise(done => setTimeout(done, {1000 * _STEP_SECONDS}))")

    async def press(self, *keys: str) -> None:
        """Press keys by name, such as ArrowDown."""
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
            code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
            values = {"key": key, "windowsVirtualKeyCode": code[key], **text}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **values)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code[key])

    async def screenshot(self, path: Path) -> None:
        """Write a PNG file."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """Start the browser with a new profile in the folder, and yield the address of its debugging protocol."""
    assert CHROMIUM is not None
    words = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    errors = folder / "chromium.log"
    with errors.open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
    try:
        end = time.monotonic() + _START_SECONDS
        while not (found := re.search(r"ws://([\d.:]+)/", errors.read_text())):
            assert time.monotonic() < end, errors.read_text()[-2000:]
            assert process.poll() is None, errors.read_text()[-2000:]
            time.sleep(_STEP_SECONDS)
        yield f"http://{found[1]}"
    finally:
        process.kill()
        process.wait()


async def new_page(session: ClientSession, browser: str) -> Page:
    """Open a tab."""
    async with session.put(f"{browser}/json/new?about:blank") as answer:
        found = await answer.json()
    return Page(await session.ws_connect(found["webSocketDebuggerUrl"], max_msg_size=0))


async def accessibility_problems(page: Page) -> list[str]:
    """Return the serious violations that axe finds on the open page: rule and first element of each."""
    script = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    await page.value(f"{script};1")
    serious = "violations.filter(one => ['serious', 'critical'].includes(one.impact))"
    shown = "map(one => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`)"
    found: list[str] = await page.value(f"axe.run().then(all => all.{serious}.{shown})")
    return found
