"""The process that renders chat templates; `templates.py` starts it and explains why it exists.

A request is a line on stdin, seconds and a JSON object; its answer is a line on stdout, an object.
It runs as a script, without NPT and torch, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY = 1 << 30  # bytes that a template may take
CHARACTERS = 10_000_000  # of a rendered conversation


def limit_memory() -> None:
    """Let an allocation beyond MEMORY fail from now on, where the system supports that."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = Path("/proc/self/statm").read_text().split()[0]
        most = int(pages) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answer(request: str) -> dict[str, Any]:
    """Return {"text": ...}, {"error": ...} or, if the template needs too much, {"limit": ...}."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), _ = render_jinja_template(**json.loads(request))
    except MemoryError:
        return {"limit": f"needs more than {MEMORY >> 30} GiB of memory"}
    except Exception as error:  # a template may raise any error
        return {"error": str(error) or type(error).__name__}
    if len(text) > CHARACTERS:
        return {"error": f"it writes {len(text):,} characters, more than {CHARACTERS:,}"}
    return {"text": text}


def main() -> None:
    """Answer until stdin ends. A request that takes too long ends the process by SIGALRM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's; the run saves before it ends
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ignoring and blocking are inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    answer("{}")  # imports, which are no part of a template's time and memory
    limit_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    for line in sys.stdin:
        seconds, _, request = line.partition(" ")
        # The system ends the process, in any operation. `faulthandler` would first walk the frames
        # of the running thread, and reading frames that change crashes with SIGSEGV now and then.
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        answers.write(json.dumps(answer(request)) + "\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
