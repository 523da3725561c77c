"""Drive a headless Chromium over the W3C WebDriver protocol, with the standard library alone."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives to an element's reference
needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs chromium and chromedriver on PATH (Debian: apt install chromium chromium-driver)",
)


class Browser:
    """A browser session: `with Browser() as browser: browser.open(path.as_uri())`."""

    def __init__(self, width: int = 1440, height: int = 1000) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.driver.stdout
        port = next(m[1] for line in self.driver.stdout if (m := re.search(r"successfully on port (\d+)", line)))
        self.url = f"http://127.0.0.1:{port}/session"
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --user-data-dir={self.profile.name}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*flags.split(), f"--window-size={width},{height}"],
        }
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            session = self._send("POST", "", {"capabilities": {"alwaysMatch": capabilities}})
        except BaseException:
            self._stop()
            raise
        self.url += f"/{session['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._stop()

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def script(self, body: str, *arguments: object) -> Any:
        """Run the body of a JavaScript function and give what it returns."""
        return self._send("POST", "/execute/sync", {"script": body, "args": arguments})

    def click(self, selector: str) -> None:
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._send("POST", f"/element/{element}/click", {})

    def press(self, selector: str, key: str) -> None:
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._send("POST", f"/element/{element}/value", {"text": key})

    def point(self, selector: str, dx: int = 0, dy: int = 0) -> None:
        """Move the mouse to the middle of an element, off by (dx, dy) pixels."""
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        move = {"type": "pointerMove", "duration": 0, "origin": element, "x": dx, "y": dy}
        self._send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def drag(self, selector: str, begin: int, end: int, kind: str = "mouse") -> None:
        """Draw the mouse (or a finger: `touch`) over an element, from one distance from its middle to another."""
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        places = [begin, (begin + end) // 2, end]
        move = [{"type": "pointerMove", "duration": 0, "origin": element, "x": x, "y": 0} for x in places]
        steps = [move[0], {"type": "pointerDown", "button": 0}, *move[1:], {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": kind, "parameters": {"pointerType": kind}, "actions": steps}
        self._send("POST", "/actions", {"actions": [pointer]})

    def double_click(self, selector: str) -> None:
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        click = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        move = {"type": "pointerMove", "duration": 0, "origin": element, "x": 0, "y": 0}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move, *click, *click]}
        self._send("POST", "/actions", {"actions": [pointer]})

    def colours(self, scheme: str) -> None:
        """Pretend that the reader prefers `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send(
            "POST",
            "/goog/cdp/execute",
            {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}},
        )

    def size(self, width: int, height: int) -> None:
        """Give the window another size, and the page two frames to lay itself out again."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._send("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})
        self.script("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def errors(self) -> list[str]:
        """Give the console's messages of level SEVERE since the last call."""
        log = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def _send(self, method: str, path: str, body: object = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            problem = json.load(error)["value"]
            raise RuntimeError(f"{method} {path}: {problem['error']}: {problem['message'].splitlines()[0]}") from None

    def _stop(self) -> None:
        self.driver.terminate()
        self.driver.wait(60)
        if self.driver.stdout:
            self.driver.stdout.close()
        self.profile.cleanup()
