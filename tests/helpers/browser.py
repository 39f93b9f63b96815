"""A headless Chromium at the end of a pipe, by its own protocol: how a page looks in it, and its
complaints.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
NAMES += ("google-chrome", "google-chrome-stable", "chrome")
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
FLAGS += ["--no-first-run", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
FLAGS += ["--remote-debugging-pipe", "about:blank"]


def find() -> str | None:
    """A browser on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page at a time. The browser has no network and a profile of its own, and is gone at the
    end.

    Attributes:
        complaints: errors and warnings of the console, exceptions, and requests for anything but
            the page itself and what it holds.
    """

    def __init__(self, program: str, timeout: float = 60.0):
        self._timeout = timeout
        self._profile = tempfile.TemporaryDirectory(
            prefix="npt-browser-", ignore_cleanup_errors=True
        )
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def place() -> None:  # the protocol's pipes are the descriptors 3 and 4
            # either may be 3 or 4
            first, second = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write))
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, f"--user-data-dir={self._profile.name}", *FLAGS],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self._url = ""
        self._loaded = False
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, and wait until it has loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[colours])
        self._loaded, self._url = False, page.absolute().as_uri()
        self._call("Page.navigate", url=self._url)
        end = time.monotonic() + self._timeout
        while not self._loaded:
            self._take(end)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self._timeout
        while True:
            answer = self._take(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _take(self, end: float) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("the browser is gone")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(json.dumps(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            asked = found["request"]["url"]
            if asked not in (self._url, "about:blank") and not asked.startswith("data:"):
                self.complaints.append(f"asked for {asked}")
