"""A model hub of one's own, on this machine: as much of its HTTP interface as an adapter's upload
and download ask for.
"""

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

        @property
        def known(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def missing(self, status: int, code: str) -> None:
            self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

        def do_POST(self) -> None:
            hub.asked.append(("POST", self.path))
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if hub.refuse or not self.known:
                self.answer(hub.refuse or 401, {"error": "not yours"})
                return
            parts = self.path.split("?")[0].strip("/").split("/")
            repo, action = "/".join(parts[2:4]), parts[4:5]
            if parts == ["api", "repos", "create"]:
                asked = json.loads(body)
                owner = asked.get("organization")
                repo = f"{owner}/{asked['name']}" if owner else asked["name"]
                if repo in hub.files:
                    self.answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
                    return
                hub.files[repo], hub.branches[repo] = {}, {"main"}
                private = asked.get("private") or asked.get("visibility") == "private"
                hub.private[repo] = bool(private)
                self.answer(200, {"url": f"{hub.url}/{repo}", "id": repo})
            elif action == ["preupload"] and parts[5] not in hub.branches[repo]:
                self.missing(404, "RevisionNotFound")
            elif action == ["preupload"]:
                # The protocol of large files (Xet) is the library's affair with another service:
                # here all are small.
                regular = {"uploadMode": "regular", "shouldIgnore": False}
                files = [{**file, **regular} for file in json.loads(body)["files"]]
                self.answer(200, {"files": files})
            elif action == ["commit"]:
                for entry in map(json.loads, body.splitlines()):
                    if entry["key"] == "file":
                        content = base64.b64decode(entry["value"]["content"])
                        hub.files[repo][entry["value"]["path"]] = content
                oid = hub.commit_of(repo)
                made = {"commitOid": oid, "commitUrl": f"{hub.url}/{repo}/commit/{oid}"}
                self.answer(200, {"success": True, "hookOutput": "", **made})
            elif parts[-1] == "validate-yaml":
                self.answer(200, {"warnings": [], "errors": []})
            else:
                self.answer(404, {"error": f"no {self.path}"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path))
            parts = self.path.split("?")[0].strip("/").split("/")
            of_api = parts[:2] == ["api", "models"]
            repo = "/".join(parts[2:4] if of_api else parts[:2])
            if repo not in hub.files or (hub.private[repo] and not self.known):
                self.missing(401, "RepoNotFound")
                return
            commit, files = hub.commit_of(repo), hub.files[repo]
            revision = parts[5] if of_api and len(parts) > 5 else "main"
            if revision not in {*hub.branches[repo], commit}:
                self.missing(404, "RevisionNotFound")
            elif of_api and parts[4:5] == ["tree"]:
                sums = {name: hashlib.sha1(raw).hexdigest() for name, raw in files.items()}
                entries = [
                    {"type": "file", "path": name, "size": len(files[name]), "oid": oid}
                    for name, oid in sums.items()
                ]
                self.answer(200, entries)
            elif of_api:
                siblings = [{"rfilename": name} for name in files]
                about = {"id": repo, "sha": commit, "private": hub.private[repo], "tags": []}
                self.answer(200, {**about, "siblings": siblings})
            elif parts[2:3] == ["resolve"] and "/".join(parts[4:]) in files:
                raw = files["/".join(parts[4:])]
                tag = {"ETag": f'"{hashlib.sha256(raw).hexdigest()}"', "X_Repo_Commit": commit}
                self.answer(200, raw, Content_Type="application/octet-stream", **tag)
            else:
                self.missing(404, "EntryNotFound")

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
