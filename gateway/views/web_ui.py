"""The pages of llama-server's own web UI, from where the supervisor put them; see supervisor/web_ui.py."""

import asyncio
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.responses import Response

from llamastead.shared.errors import ApiError
from llamastead.shared.web_ui import FOLDER, INDEX

START_PAGES = frozenset({"/", "/index.html"})


class WebUi:
    """Finds pages by path. `identity` is the herd's `web_ui`, empty where it has none."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._identity = ""
        self._pages: Mapping[str, Any] = {}

    def has(self, identity: str, path: str) -> bool:
        """Tell whether there is such a page; ApiError 503 for the start page while it is not unpacked."""
        if not identity:
            return False
        if identity != self._identity:
            try:
                self._pages = json.loads((self._folder / identity / INDEX).read_text())
            except OSError:
                if path not in START_PAGES:
                    return False
                message = "the web UI is not in the run folder of this gateway, or not yet"
                raise ApiError(503, message, retry_after=1) from None
            self._identity = identity
        return path in self._pages

    async def page(self, path: str, headers: Iterable[tuple[bytes, bytes]], request_id: str) -> Response:
        """Return a page that there is, compressed if the client takes that; 304 if it has it already."""
        given = dict(headers)
        said = {**self._pages[path]["headers"], "x-request-id": request_id}
        if path in START_PAGES:
            # The engine's own word is "for ever": a browser would never see the UI of the next engine.
            said["cache-control"] = "no-cache"
        if said.get("content-encoding"):
            said["vary"] = "Accept-Encoding"
        etag = said.get("etag", "")
        if etag and etag in given.get(b"if-none-match", b"").decode("latin-1"):
            kept = {
                name: said[name] for name in ("etag", "cache-control", "vary", "x-request-id") if name in said
            }
            return Response(b"", 304, kept)
        file = self._folder / self._identity / self._pages[path]["file"]
        try:
            body = await asyncio.to_thread(file.read_bytes)
        except OSError:
            self._identity = ""  # another engine's pages have taken its place
            raise ApiError(503, "the web UI has just been replaced", retry_after=1) from None
        if said.get("content-encoding") == "gzip" and b"gzip" not in given.get(b"accept-encoding", b""):
            del said["content-encoding"]
            body = await asyncio.to_thread(gzip.decompress, body)
        return Response(body, 200, said)
