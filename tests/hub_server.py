"""A small local Hugging Face hub, with the requests that huggingface_hub makes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Repository:
    """Files by revision; a gated repository needs the token."""

    revisions: dict[str, dict[str, bytes]]
    is_gated: bool = False
    is_private: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit; None where there is none."""
        commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in self.revisions}
        return revision if revision in commits.values() else commits.get(revision)

    def files(self, revision: str) -> dict[str, bytes]:
        return next(f for n, f in self.revisions.items() if self.commit(n) == self.commit(revision))


@dataclass
class Hub:
    """The repositories of a server, and the files that were fetched of them."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def add(self, name: str, *directories: Path, **settings: Any) -> Repository:
        """A repository with the files below directories, each a revision: main, v1, v2, ..."""
        revisions = {}
        for number, directory in enumerate(directories):
            files = [path for path in directory.rglob("*") if path.is_file()]
            content = {str(path.relative_to(directory)): path.read_bytes() for path in files}
            revisions[f"v{number}" if number else "main"] = content
        self.repositories[name] = Repository(revisions, **settings)
        return self.repositories[name]


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that answers while the block runs."""
    made = Hub()
    handler = type("Handler", (_Handler,), {"hub": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        is_api = parts[:2] == ["api", "models"]
        owner, name, verb, revision, *rest = [*parts[2 * is_api :], *["", ""]][: len(parts) + 2]
        repository = self.hub.repositories.get(f"{owner}/{name}")
        may_read = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.is_private and not may_read):
            return self._refuse(401, "RepoNotFound")
        if not verb:
            verb, revision = "revision", "main"
        commit = repository.commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = repository.files(revision)
        if is_api and verb == "revision":
            siblings = [{"rfilename": path} for path in files]
            return self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        if is_api and verb == "tree":
            return self._json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                    for path, content in files.items()
                ]
            )
        path = "/".join(part for part in rest if part)
        if verb != "resolve" or path not in files:
            return self._refuse(404, "EntryNotFound")
        if repository.is_gated and not may_read:
            return self._refuse(403, "GatedRepo")
        if self.command == "GET":
            self.hub.fetched.append(path)
        content = files[path]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit}
        return self._answer(200, content, headers)

    do_HEAD = do_GET

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
