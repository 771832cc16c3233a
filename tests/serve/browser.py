"""Chromium, driven over its debugging pipe: no driver, no port."""

import itertools
import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 120


class Browser:
    """One page. `requests` are the addresses it requested, `problems` the complaints of its console."""

    def __init__(self, profile: Path):
        assert BROWSER is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        command = ["bash", "-c", script, "bash", str(to_browser), str(from_browser), BROWSER, *flags]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._file = os.fdopen(self._in, "rb")
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self._rest = b""
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._num_loads = 0
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as in a window that somebody uses

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._in, 65536)
            assert part, "the browser has ended"
            self._rest += part
        content, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(content)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Page.loadEventFired":
            self._num_loads += 1
        elif message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(params))
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end_time = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end_time, f"{script}\n{self.run('document.body.innerText')}\n{self.problems}"
            time.sleep(0.05)
        return value

    def reload(self) -> None:
        """Load the page again, and wait until that is done."""
        before = self._num_loads
        self.call("Page.reload")
        while self._num_loads == before:
            self._next()

    def press(self, key: str, text: str = "") -> None:
        """One key."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
        event = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def look(self, width: int, height: int, scheme: str, path: Path | None = None) -> None:
        """Show the page at a size in light or dark; save a picture."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        if path is not None:
            path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        self._file.close()


def contrast(browser: Browser, element: str) -> float:
    """The contrast of an element's text with the background painted behind it, by WCAG."""
    return float(browser.run(f"({_CONTRAST})(document.querySelector({json.dumps(element)}))"))


_CONTRAST = """(element) => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(color).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  const seen = (one) => { const c = channels(getComputedStyle(one).backgroundColor); return c.length < 4 || c[3] > 0; };
  while (behind.parentElement && !seen(behind)) behind = behind.parentElement;
  const pair = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""
