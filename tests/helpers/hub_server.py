"""A small Hub on 127.0.0.1 that can create repositories, receive commits and serve files and ranges of them.

It stores every commit completely; all files are uploaded inside the commit ("regular" uploads).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

USER = "somebody"


class Hub(ThreadingHTTPServer):
    """Repositories by id, each a list of commits, each a dict of files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}

    @property
    def endpoint(self) -> str:
        """Value for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repository: str) -> dict[str, bytes]:
        """Return the files of the last commit."""
        return self.repositories[repository][-1]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a Hub while the context is open."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def constants(hub: Hub, cache: Path) -> dict[str, Any]:
    """Return constants of huggingface_hub with which it uses a Hub."""
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    found = {"ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
    return {**found, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(cache)}


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._path()
        if path == ["api", "validate-yaml"]:
            self._send_json({})
        elif path == ["api", "repos", "create"]:
            request = json.loads(body)
            name = f"{request.get('organization') or USER}/{request['name']}"
            status = 409 if name in self.server.repositories else 200
            self.server.repositories.setdefault(name, [{}])
            self._send_json({"url": f"{self.server.endpoint}/{name}", "name": name}, status)
        elif path[:2] == ["api", "models"] and path[4] == "paths-info":
            files = self.server.files("/".join(path[2:4]))
            paths = parse_qs(body.decode())["paths"]
            self._send_json([_entry(path, files[path]) for path in paths if path in files])
        elif path[:2] == ["api", "models"] and path[4] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._send_json({"files": files})
        elif path[:2] == ["api", "models"] and path[4] == "commit":
            name = "/".join(path[2:4])
            files = dict(self.server.files(name))
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                elif item["key"] == "deletedFile":
                    del files[item["value"]["path"]]
            self.server.repositories[name].append(files)
            commit = self._commit(name)
            url = f"{self.server.endpoint}/{name}/commit/{commit}"
            self._send_json({"success": True, "commitOid": commit, "commitUrl": url})
        else:
            self._send_missing("RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._path()
        if path == ["api", "whoami-v2"]:
            self._send_json({"name": USER, "type": "user", "orgs": []})
            return
        api = path[:2] == ["api", "models"]
        name = "/".join(path[2:4] if api else path[:2])
        if name not in self.server.repositories:
            self._send_missing("RepoNotFound")
        elif api and len(path) > 4 and path[4] == "tree":
            inside = "".join(part + "/" for part in path[6:])
            files = self.server.files(name).items()
            tree = [_entry(file, data) for file, data in files if file.startswith(inside)]
            if tree or not inside:
                self._send_json(tree)
            else:
                self._send_missing("EntryNotFound")
        elif api:
            names = [{"rfilename": file} for file in self.server.files(name)]
            self._send_json(
                {"id": name, "modelId": name, "sha": self._commit(name), "private": False, "siblings": names}
            )
        elif path[2] == "resolve":
            data = self.server.files(name).get("/".join(path[4:]))
            if data is None:
                self._send_missing("EntryNotFound", self._commit(name))
            else:
                headers = {"X-Repo-Commit": self._commit(name), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
                first, last = re.findall(r"\d+", self.headers.get("Range", "")) or (0, len(data))
                self._send(206 if "Range" in self.headers else 200, data[int(first) : int(last) + 1], headers)
        else:
            self._send_missing("RepoNotFound")

    def _path(self) -> list[str]:
        """Return the parts of the path. Datasets are served as models are."""
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        return ["api", "models", *path[2:]] if path[:2] == ["api", "datasets"] else path[path[0] == "datasets" :]

    def _commit(self, name: str) -> str:
        return hashlib.sha1(f"{name} {len(self.server.repositories[name])}".encode()).hexdigest()

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_missing(self, code: str, commit: str = "") -> None:
        self._send(404, b"", {"X-Error-Code": code, **({"X-Repo-Commit": commit} if commit else {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
