"""A real browser, controlled through a pipe with Chromium's DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Page:
    """A page of the browser; scripts do what a person would do."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._sent = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        """Open a URL, and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def download_into(self, folder: Path) -> None:
        """Keep what the page saves in `folder`, under the names that it gives."""
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def picture(self, file: Path, width: int, height: int) -> None:
        """Write a PNG of the page in a window of this size."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; awaits promises."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds, polling every 20 ms; only the test's time limit ends the wait."""
        self.run(
            f"new Promise((done) => {{ const look = () => ({condition}) ? done() : setTimeout(look, 20); look(); }})"
        )

    def _call(self, method: str, **params: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> Any:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        return json.loads(text)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """An empty page of a browser that keeps its files in `profile`."""
    assert CHROMIUM is not None
    browser_in, commands = os.pipe()
    answers, browser_out = os.pipe()
    options = f"--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --user-data-dir={profile}"
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{browser_in} 4>&{browser_out}', CHROMIUM, *options.split()],
        pass_fds=(browser_in, browser_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(browser_in)
    os.close(browser_out)
    try:
        yield Page(commands, answers)
    finally:
        process.terminate()
        process.wait()
