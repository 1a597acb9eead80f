"""A small stand-in for huggingface.co: repositories from a dict, over the protocol that huggingface_hub speaks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(
    repos: dict[str, dict[str, bytes]], gated: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[str]]]:
    """Yields (its URL, the list of files that were downloaded, each as "owner/name/file")."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.repo("/".join(parts[2:4]), parts[4:], body)
            elif "resolve" in parts:
                at = parts.index("resolve")
                self.file("/".join(parts[:at]), "/".join(parts[at + 2 :]), body)
            else:
                self.send(404, b"{}", body)

        def refused(self, name: str, body: bool) -> bool:
            if name in gated:
                self.send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
            elif name not in repos:
                self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            return name in gated or name not in repos

        def repo(self, name: str, rest: list[str], body: bool) -> None:
            if self.refused(name, body):
                return
            files = repos[name]
            if rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}  # noqa: S324
                    for path, data in files.items()
                ]
                self.send(200, json.dumps(entries).encode(), body)
                return
            siblings = [{"rfilename": path} for path in files]
            self.send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode(), body)

        def file(self, name: str, path: str, body: bool) -> None:
            if self.refused(name, body):
                return
            if path not in repos[name]:
                self.send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
                return
            data = repos[name][path]
            if body:
                fetched.append(f"{name}/{path}")
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(200, data, body, headers)

        def send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
