"""A model hub of one's own, on this machine: as much of its HTTP interface as an adapter's upload
and download ask for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_the_tests"


class Hub:
    """Repositories: files by name, by repository and commit; `refuse` answers every write with that
    status.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.branches: dict[str, set[str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.refuse: int | None = None
        self.url = ""

    def commit_of(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files[repo].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def answer(self, status: int, content: Any = b"", **headers: str) -> None:
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            headers.setdefault("Content_Type", "application/json")
            headers.setdefault("Content_Length", str(len(raw)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(raw)

        def refused(self) -> bool:
            """Return whether a write is turned away: no token, or the hub is told to."""
            status = hub.refuse or (
                None if self.headers.get("Authorization") == f"Bearer {TOKEN}" else 401
            )
            if status is not None:
                self.answer(status, {"error": "not yours"})
            return status is not None

        def do_POST(self) -> None:
            hub.asked.append(("POST", self.path))
            body = self.body()
            if self.refused():
                return
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts == ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = (
                    f"{asked['organization']}/{asked['name']}"
                    if asked.get("organization")
                    else asked["name"]
                )
                if repo in hub.files:
                    self.answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
                    return
                hub.files[repo], hub.branches[repo] = {}, {"main"}
                hub.private[repo] = (
                    bool(asked.get("private")) or asked.get("visibility") == "private"
                )
                self.answer(200, {"url": f"{hub.url}/{repo}", "id": repo})
            elif parts[:2] == ["api", "models"] and parts[4:5] == ["preupload"]:
                if parts[5] not in hub.branches["/".join(parts[2:4])]:
                    self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
                    return
                files = json.loads(body)["files"]
                # The protocol of large files (Xet) is the library's affair with another service:
                # here all are small.
                self.answer(
                    200,
                    {
                        "files": [
                            {**f, "uploadMode": "regular", "shouldIgnore": False} for f in files
                        ]
                    },
                )
            elif parts[:2] == ["api", "models"] and parts[4:5] == ["commit"]:
                repo = "/".join(parts[2:4])
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        hub.files[repo][entry["value"]["path"]] = base64.b64decode(
                            entry["value"]["content"]
                        )
                oid = hub.commit_of(repo)
                self.answer(
                    200,
                    {
                        "success": True,
                        "commitOid": oid,
                        "commitUrl": f"{hub.url}/{repo}/commit/{oid}",
                        "hookOutput": "",
                    },
                )
            elif parts[-1] == "validate-yaml":
                self.answer(200, {"warnings": [], "errors": []})
            else:
                self.answer(404, {"error": f"no {self.path}"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path))
            parts = self.path.split("?")[0].strip("/").split("/")
            repo = "/".join(parts[2:4]) if parts[:2] == ["api", "models"] else "/".join(parts[:2])
            if repo not in hub.files or (
                hub.private[repo] and self.headers.get("Authorization") != f"Bearer {TOKEN}"
            ):
                self.answer(
                    401,
                    {"error": "Repository not found"},
                    X_Error_Code="RepoNotFound",
                    X_Error_Message="Repository not found",
                )
                return
            commit = hub.commit_of(repo)
            if parts[:2] == ["api", "models"]:
                revision = parts[5] if len(parts) > 5 else "main"
                if revision not in {*hub.branches[repo], commit}:
                    self.answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
                elif parts[4:5] == ["tree"]:
                    entries = [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(raw),
                            "oid": hashlib.sha1(raw).hexdigest(),
                        }
                        for name, raw in hub.files[repo].items()
                    ]
                    self.answer(200, entries)
                else:
                    siblings = [{"rfilename": name} for name in hub.files[repo]]
                    self.answer(
                        200,
                        {
                            "id": repo,
                            "sha": commit,
                            "private": hub.private[repo],
                            "siblings": siblings,
                            "tags": [],
                        },
                    )
            elif parts[2:3] == ["resolve"] and "/".join(parts[4:]) in hub.files[repo]:
                raw = hub.files[repo]["/".join(parts[4:])]
                tag = hashlib.sha256(raw).hexdigest()
                self.answer(
                    200,
                    raw,
                    ETag=f'"{tag}"',
                    X_Repo_Commit=commit,
                    Content_Type="application/octet-stream",
                )
            else:
                self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
