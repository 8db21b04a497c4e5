"""A stand-in of the Hugging Face hub on loopback: its API and its files over HTTP, with faults on demand."""

import hashlib
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

LFS_FROM = 1024  # bytes from which a file is kept apart, as weights are
PIECE = 16 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Blob:
    """One version of a file."""

    content: bytes

    @property
    def lfs(self) -> bool:
        """Whether the hub keeps it apart and knows it by its SHA-256."""
        return len(self.content) >= LFS_FROM

    @property
    def git_id(self) -> str:
        """The id that git gives a file."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        """The SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self) -> str:
        """What the hub calls this content: the name of the file below `blobs` in a cache."""
        return self.sha256 if self.lfs else self.git_id


@dataclass
class Fault:
    """What goes wrong with requests whose path contains `match`; `hits` counts how often it did.

    `status`: answered instead. `cut`: the connection is dropped after so many bytes. `short`: the answer ends
    there and says that this is all. `wrong`: other bytes of the same length. `slow`: bytes per second.
    `whole`: ranges are ignored.
    `mute`: no answer at all comes until `release` is set.
    `hold`: from that byte on nothing comes until `release` is set; `held` says that it came to that.
    """

    match: str
    status: int = 0
    code: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    short: int | None = None
    wrong: bool = False
    slow: int = 0
    whole: bool = False
    hold: int | None = None
    mute: bool = False
    times: int = 1_000_000
    hits: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Request:
    """One request that arrived."""

    method: str
    path: str
    range: str
    authorization: str
    host: str


class Hub:
    """Repositories, their faults, and every request that came. Safe to change while it serves."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Blob]] = {}
        self.commits: dict[str, dict[str, dict[str, Blob]]] = {}
        self.heads: dict[str, str] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.tokens: dict[str, set[str]] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.url = self.cdn = ""

    def add(self, repo: str, files: Mapping[str, bytes]) -> str:
        """Put these files on top of what a repository has and return the new commit."""
        tree = {**self.repos.get(repo, {}), **{name: Blob(content) for name, content in files.items()}}
        commit = hashlib.sha1(repr((repo, sorted((n, b.etag) for n, b in tree.items()))).encode()).hexdigest()
        self.repos[repo] = tree
        self.commits.setdefault(repo, {})[commit] = tree
        self.heads[repo] = commit
        return commit

    def token(self, token: str, *repos: str) -> None:
        """Make a token known that opens these gated or private repositories."""
        self.tokens[token] = set(repos)

    def fault(self, match: str, **what: Any) -> Fault:
        """Have something go wrong from now on."""
        made = Fault(match, **what)
        self.faults.append(made)
        return made

    def count(self, match: str = "", method: str = "GET") -> int:
        """Return how many requests came whose path contains `match`."""
        return sum(r.method == method and match in r.path for r in self.requests)

    def from_the_start(self, match: str) -> list[str]:
        """Return the paths with `match` of which all bytes were asked for: a transfer that made way for other
        jobs, as a slow one does, goes on where it was with a request for the rest.
        """
        return [r.path for r in self.requests if r.method == "GET" and match in r.path and not r.range]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def _serve(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        given = self.headers.get("Authorization", "")
        with self.hub.lock:
            self.hub.requests.append(
                Request(
                    self.command, path, self.headers.get("Range", ""), given, self.headers.get("Host", "")
                )
            )
            fault = self._fault(path)
        try:
            if fault and fault.mute:
                fault.held.set()
                fault.release.wait(60)
                self.close_connection = True
            elif fault and fault.status:
                self._refuse(fault.status, fault.code, "told to", fault.headers)
            elif path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            elif path.startswith("/cdn/"):
                _, _, owner, name, etag, _ = path.split("/", 5)
                self._file(f"{owner}/{name}", etag, body, fault)
            elif "/resolve/" in path:
                self._resolve(path, body, fault)
            else:
                self._refuse(404, "", "Not Found")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _fault(self, path: str) -> Fault | None:
        """Return what is to go wrong with this request. A redirect can only be refused: it has no bytes."""
        repo, resolves, rest = path.strip("/").partition("/resolve/")
        blob = self.hub.repos.get(repo, {}).get(rest.partition("/")[2]) if resolves else None
        for fault in self.hub.faults:
            if (
                fault.match in path
                and fault.hits < fault.times
                and (fault.status or fault.mute or not (blob and blob.lfs))
            ):
                fault.hits += 1
                return fault
        return None

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _closed(self, repo: str, *, files: bool) -> bool:
        """Refuse what this caller may not see; True when it was refused."""
        token = self._token()
        opens = self.hub.tokens.get(token, set())
        if token and token not in self.hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo not in self.hub.repos or (repo in self.hub.private and repo not in opens):
            if token:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif files and repo in self.hub.gated and repo not in opens:
            why = f"Access to model {repo} is restricted."
            self._refuse(403 if token else 401, "GatedRepo", why)
        else:
            return False
        return True

    def _api(self, rest: str) -> None:
        parts = rest.split("/")
        repo, more = "/".join(parts[:2]), parts[2:]
        if self._closed(repo, files=False):
            return
        revision = more[1] if len(more) > 1 else "main"
        commit = self._commit(repo, revision)
        if commit is None:
            return
        tree = self.hub.commits[repo][commit]
        if not more or more[0] == "revision":
            siblings = [_sibling(name, blob) for name, blob in sorted(tree.items())]
            self._json({"id": repo, "modelId": repo, "sha": commit, "private": repo in self.hub.private,
                        "gated": "manual" if repo in self.hub.gated else False, "disabled": False,
                        "tags": ["gguf"], "downloads": 0, "siblings": siblings})  # fmt: skip
        elif more[0] == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": commit}
            self._json({"branches": [branch], "converts": [], "tags": []})
        elif more[0] == "tree":
            self._json([_node(name, blob) for name, blob in sorted(tree.items())])
        else:
            self._refuse(404, "", "Not Found")

    def _commit(self, repo: str, revision: str) -> str | None:
        commit = self.hub.heads[repo] if revision == "main" else revision
        if commit in self.hub.commits[repo]:
            return commit
        self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _resolve(self, path: str, body: bool, fault: Fault | None) -> None:
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self._closed(repo, files=True):
            return
        commit = self._commit(repo, revision)
        if commit is None:
            return
        blob = self.hub.commits[repo][commit].get(name)
        if blob is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit}
        if not blob.lfs:
            self._content(blob, body, fault, headers | {"ETag": f'"{blob.etag}"'})
            return
        place = f"{self.hub.cdn}/cdn/{repo}/{blob.etag}/{quote(name)}"
        linked = {"X-Linked-Size": str(len(blob.content)), "X-Linked-ETag": f'"{blob.etag}"'}
        self._head(302, headers | linked | {"Location": place, "Content-Length": "0"})

    def _file(self, repo: str, etag: str, body: bool, fault: Fault | None) -> None:
        trees = self.hub.commits[repo].values()
        blob = next(b for tree in trees for b in tree.values() if b.etag == etag)
        self._content(blob, body, fault, {"ETag": f'"{etag}"'})

    def _content(self, blob: Blob, body: bool, fault: Fault | None, headers: Mapping[str, str]) -> None:
        content = blob.content
        if fault and fault.wrong:
            content = bytes(255 - byte for byte in content)
        if fault and fault.short is not None:
            content = content[: fault.short]
        begin, status = 0, 200
        more = {"Accept-Ranges": "bytes"}
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted and not (fault and fault.whole):
            begin, status = int(wanted[1]), 206
            if begin >= len(content):
                self._refuse(416, "", "out of range", {"Content-Range": f"bytes */{len(content)}"})
                return
            more["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._head(status, {**headers, **more, "Content-Length": str(len(content) - begin)})
        if body:
            self._send(content, begin, fault)

    def _send(self, content: bytes, at: int, fault: Fault | None) -> None:
        while at < len(content):
            end = min(at + PIECE, len(content))
            if fault and fault.hold is not None and end > fault.hold and not fault.release.is_set():
                end = max(at, fault.hold)
                if at == end:
                    fault.held.set()
                    fault.release.wait(60)
                    continue
            if fault and fault.cut is not None and end > fault.cut:
                self.wfile.write(content[at : max(at, fault.cut)])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(content[at:end])
            if fault and fault.slow:
                time.sleep((end - at) / fault.slow)
            at = end

    def _json(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(text))})
        self.wfile.write(text)

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] = {}) -> None:
        text = json.dumps({"error": message}).encode()
        why = {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
        self._head(status, {**why, **headers, "Content-Length": str(len(text))})
        if self.command != "HEAD":
            self.wfile.write(text)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _sibling(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(blob.content), "blobId": blob.git_id}
    if blob.lfs:
        entry["lfs"] = {"sha256": blob.sha256, "size": len(blob.content), "pointerSize": 134}
    return entry


def _node(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": blob.git_id, "size": len(blob.content)}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 134}
    return entry


@contextmanager
def hub(certificate: Path | None = None) -> Iterator[Hub]:
    """Yield a hub that serves, with a certificate and its key over TLS; point HF_ENDPOINT at its `url`."""
    made = Hub()
    handler = type("Handler", (_Handler,), {"hub": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who leaves, leaves
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if certificate else "http"
    made.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    # Another origin, as a real one: what is meant for the hub alone is not sent there.
    made.cdn = f"{scheme}://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        for fault in made.faults:
            fault.release.set()
        server.shutdown()
        server.server_close()
