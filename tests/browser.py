"""Chromium, headless, driven over its debugging pipe: null-terminated JSON on file descriptors 3 and 4."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. `run` evaluates JavaScript in it (promises are awaited)."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1050):
        (theirs_in, self.to), (self.of, theirs_out) = os.pipe(), os.pipe()

        def descriptors() -> None:
            a, b = os.dup(theirs_in), os.dup(theirs_out)  # out of the way, should they be 3 or 4 themselves
            os.dup2(a, 3)
            os.dup2(b, 4)

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        flags += [
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [BINARY, *flags, "about:blank"], close_fds=False, preexec_fn=descriptors, stdout=quiet, stderr=quiet
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.numbers, self.held, self.session = itertools.count(1), b"", None
        self.events: list[dict] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict:
        while b"\0" not in self.held:
            assert select.select([self.of], [], [], 60)[0], "the browser is silent"
            self.held += os.read(self.of, 1 << 20)
        message, _, self.held = self.held.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, script: str):
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, (
                f"{condition} did not come true; the page says {self.run('document.body.innerText')}"
            )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[str]:
        """What the page wrote to the console or to the log as an error."""
        kinds = {"Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requested(self) -> set[str]:
        return {e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.of)
