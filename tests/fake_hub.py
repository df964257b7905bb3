"""A hub on loopback: as much of huggingface.co as its clients need to find and read one model, or one data set."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

REVISION = "a" * 40


class Hub:
    """`asked` collects the paths of all requests; `env` makes a process use this hub, with `home` for its cache."""

    def __init__(self, url: str, home: Path):
        self.asked: list[str] = []
        self.env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": ""}

    def downloads(self) -> list[str]:
        return [
            path.rpartition("/")[2]
            for kind, _, path in (asked.partition(" ") for asked in self.asked)
            if kind == "GET" and "/resolve/" in path
        ]


@contextmanager
def hub(home: Path, name: str = "", folder: Path | None = None, kind: str = "models") -> Iterator[Hub]:
    """A hub that has the model `name`, whose files are those of `folder`; none at all without a name.

    kind: "datasets" for a data set.
    """
    api, files = f"/api/{kind}/{name}", f"/{name}/resolve/" if kind == "models" else f"/{kind}/{name}/resolve/"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            found.asked.append(f"{self.command} {path}")
            if name and path.startswith(f"{api}/tree/"):
                below = folder / path.removeprefix(f"{api}/tree/").partition("/")[2]
                if below.is_dir():
                    found_there = below.rglob("*") if "recursive=true" in self.path.lower() else below.iterdir()
                    self.answer(json.dumps([_entry(one, folder) for one in sorted(found_there)]).encode())
                else:
                    self.answer(b"{}", status=404, **{"X-Error-Code": "EntryNotFound"})
            elif name and path.startswith(api):
                siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in _files(folder)]
                self.answer(json.dumps({"id": name, "sha": REVISION, "siblings": siblings}).encode())
            elif name and path.startswith(files):
                file = folder / path.removeprefix(files).partition("/")[2]
                if file.is_file():
                    self.send_file(file)
                else:
                    self.answer(b"{}", status=404, **{"X-Error-Code": "EntryNotFound"})
            else:
                self.answer(b"{}", status=401, **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def send_file(self, file: Path) -> None:
            data, wanted = file.read_bytes(), self.headers.get("Range")
            if not wanted:
                self.answer(data, ETag=f'"{_sha1(file)}"')
                return
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = slice(int(first), min(int(last or len(data)), len(data) - 1) + 1)
            ranges = {"Content-Range": f"bytes {part.start}-{part.stop - 1}/{len(data)}"}
            self.answer(data[part], status=206, ETag=f'"{_sha1(file)}"', **ranges)

        def answer(self, data: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), "X-Repo-Commit": REVISION, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Hub(f"http://127.0.0.1:{server.server_port}", home)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(path: Path, folder: Path) -> dict:
    about = {"path": path.relative_to(folder).as_posix()}
    if path.is_dir():
        return about | {"type": "directory", "size": 0, "oid": "b" * 40}
    return about | {"type": "file", "size": path.stat().st_size, "oid": _sha1(path)}


def _sha1(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
