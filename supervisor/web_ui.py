"""llama-server's own web UI, taken out of the engine once, so that gateways can serve it while no model runs.

The pages are part of the engine's binary and only it can name and hand them out: it is started for a moment
as a router without models, asked for its start page, and for what that and its scripts refer to.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from llamastead.shared.jobs import file_identity
from llamastead.shared.web_ui import FOLDER, INDEX, KEPT_HEADERS
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.launch import instance_environment

log = logging.getLogger(__name__)

START_SECONDS = 30.0
# Not everything is referred to by a page or script.
FIRST = ("/", "/index.html", "/favicon.ico", "/favicon.svg", "/sw.js", "/manifest.webmanifest", "/build.json")
_TEXT = ("html", "javascript", "json", "css")
_REFERENCE = re.compile(
    r"""(?<=["'(=`])(?:\./|/)?([\w][\w./-]*\.(?:m?js|css|json|html|svg|png|ico|webmanifest|woff2?|wasm))\b"""
)
_MOST_PAGES = 1000  # asked for at most; a build names about a hundred
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def ui_identity(engine: Engine) -> str:
    """Return a name for the UI of this engine as it is now. Raises OSError when it is gone."""
    binary = engine.path.resolve()
    return file_identity((binary, *sorted(binary.parent.glob("lib*server*"))))


async def unpack(engine: Engine, identity: str, run_dir: Path, environ: Mapping[str, str]) -> None:
    """Put the engine's UI below the run folder as `identity` unless it is there; failing costs no more."""
    folder = run_dir / FOLDER / identity
    if (folder / INDEX).exists():
        return
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="", dir=folder.parent))
        try:
            async with asyncio.timeout(START_SECONDS), _pages_of(engine, made, environ) as client:
                pages = await _take_out(client, made)
            (made / INDEX).write_text(json.dumps(pages, indent=1))
            for old in folder.parent.iterdir():
                if old != made:
                    shutil.rmtree(old, ignore_errors=True)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except (OSError, httpx.HTTPError, TimeoutError) as problem:
        log.warning("the engine's web UI can't be served", extra={"problem": str(problem)})
    else:
        log.info("the engine's web UI is unpacked", extra={"pages": len(pages)})


@contextlib.asynccontextmanager
async def _pages_of(engine: Engine, folder: Path, environ: Mapping[str, str]) -> Any:
    """Run the engine as a router without models for as long as the context lasts; yield a client of it."""
    empty, socket = folder / "empty", folder / "s.sock"
    empty.mkdir()
    words = [str(engine.path), "--models-dir", str(empty), "--host", str(socket), "--no-models-autoload"]
    env = instance_environment(
        {k: v for k, v in environ.items() if not k.startswith("LLAMA_")}, engine.options
    )
    del env["LLAMA_SERVER_ROUTER_PORT"]
    env |= dict.fromkeys(("XDG_CONFIG_HOME", "LLAMA_CACHE", "HF_HOME"), str(empty))
    process = await asyncio.create_subprocess_exec(
        *words,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        headers = {"accept-encoding": "gzip"}
        async with httpx.AsyncClient(transport=transport, base_url="http://ui", headers=headers) as client:
            await _until_up(client, process)
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        socket.unlink(missing_ok=True)


async def _until_up(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/health")).is_success:
                return
        if process.returncode is not None:
            raise OSError(f"the engine ended with code {process.returncode} before it served its pages")
        await asyncio.sleep(0.02)


async def _take_out(client: httpx.AsyncClient, folder: Path) -> dict[str, dict[str, Any]]:
    """Write every page that can be found to a file; return path → file name and headers."""
    pages: dict[str, dict[str, Any]] = {}
    asked, waiting = set(FIRST), list(FIRST)
    while waiting:
        path = waiting.pop(0)
        async with client.stream("GET", path) as answer:
            body = b"".join([part async for part in answer.aiter_raw()])
        if not answer.is_success:
            continue
        name = str(len(pages))
        (folder / name).write_bytes(body)
        headers = {name: answer.headers[name] for name in KEPT_HEADERS if answer.headers.get(name)}
        pages[path] = {"file": name, "headers": headers}
        if any(kind in answer.headers.get("content-type", "") for kind in _TEXT):
            found = [f"/{reference}" for reference in _references(_decoded(answer, body))]
            waiting += [path for path in found if path not in asked][: _MOST_PAGES - len(asked)]
            asked.update(waiting)
    return pages


def _decoded(answer: httpx.Response, body: bytes) -> str:
    headers = {"content-encoding": answer.headers.get("content-encoding", "identity")}
    return httpx.Response(200, headers=headers, content=body).text


def _references(text: str) -> Iterator[str]:
    """Yield the paths that a page or script may refer to, each once."""
    yield from dict.fromkeys(match[1] for match in _REFERENCE.finditer(text))


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
