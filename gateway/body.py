"""A request's body: read once, decoded, searched for the model's name on the way, kept to be sent again."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from io import FileIO
from typing import Any

from llamastead.gateway.formscan import BrokenForm, FormScan
from llamastead.gateway.inflate import CODINGS, BrokenCoding, Inflate
from llamastead.gateway.jsonscan import BrokenJson, JsonScan, ModelField, model_of_json
from llamastead.shared.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = Iterable[tuple[bytes, bytes]]

MEMORY_BYTES = 1024 * 1024
"""Bodies up to this size stay in memory; larger ones go to an unnamed temporary file."""

_PIECE_BYTES = 256 * 1024


class ClientGone(Exception):  # noqa: N818
    """The client closed its side: there is nobody to answer."""


class Body:
    """A whole request body, in memory or in a temporary file, and the model it names.

    `kept`: somebody has still to look into it, whatever has become of the request.
    """

    def __init__(self) -> None:
        self.kept = False
        self.size = 0
        self.model: ModelField = None
        self.data = b""
        self._parts: list[bytes] = []
        self._held = 0
        self._file: FileIO | None = None

    @classmethod
    def of(cls, data: bytes) -> "Body":
        """Return a body of our own making."""
        body = cls()
        body.data, body.size = data, len(data)
        return body

    @property
    def in_memory(self) -> bool:
        """True when `data` is the whole body."""
        return self._file is None

    async def read_at(self, offset: int) -> bytes:
        """Return a piece of a body that is not in memory; pieces end at `size`."""
        assert self._file is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, os.pread, self._file.fileno(), _PIECE_BYTES, offset)

    def forget(self) -> None:
        """Let go of what is in memory: it is not to be sent again, and its answer may take long."""
        if self.in_memory and not self.kept:
            self.data, self.size = b"", 0

    def close(self) -> None:
        """Let go of the temporary file."""
        if self._file is not None:
            self._file.close()

    async def _add(self, data: bytes) -> None:
        self.size += len(data)
        self._parts.append(data)
        self._held += len(data)
        if self._held > MEMORY_BYTES:
            await self._spill()

    async def _end(self) -> None:
        if self._file is not None:
            await self._spill()
        else:
            self.data = b"".join(self._parts)
            self._parts.clear()

    async def _spill(self) -> None:
        data = b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- lives as long as the body
        file = self._file
        writing = asyncio.get_running_loop().run_in_executor(None, _write_all, file, data)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread still writes; a file closed under it could give its number to another one.
            self._file = None
            writing.add_done_callback(lambda _: file.close())
            raise


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


async def read_body(receive: Receive, headers: Headers, max_bytes: int, *, search: bool) -> Body:
    """Read a request's whole body from `receive`; with `search`, find the model it names.

    A compressed body is kept decoded, and `max_bytes` bounds what it decodes to.
    Raises ApiError: 400 for a length given twice over or a body that isn't what it says (with the position),
    413 above `max_bytes`, 415 for an unknown coding, 503 when it can't be stored. Raises ClientGone.
    """
    content_type, coding = _check_head(headers, max_bytes)
    inflate = Inflate(coding) if coding else None
    body = Body()
    try:
        await _read_into(body, receive, content_type if search else None, inflate, max_bytes)
    except BaseException as error:
        body.close()
        if isinstance(error, BrokenJson):
            raise ApiError(400, f"the request body is not valid JSON: {error}") from None
        if isinstance(error, BrokenCoding):
            raise ApiError(400, f"the request body is not valid {coding.decode()}: {error}") from None
        if isinstance(error, BrokenForm):
            raise ApiError(400, f"the request body is not a valid form: {error}") from None
        if isinstance(error, OSError):
            folder = tempfile.gettempdir()
            raise ApiError(
                503,
                f"the request body could not be stored in {folder} ({error.strerror}): make room there, or "
                "start the gateway with another folder as TMPDIR",
                retry_after=1,
            ) from error
        raise
    return body


async def _read_into(
    body: Body, receive: Receive, content_type: bytes | None, inflate: Inflate | None, max_bytes: int
) -> None:
    """Fill `body`; a `content_type` of None means that nothing is searched for."""
    scan: JsonScan | FormScan | None = None
    if content_type is not None and content_type[:19].lower() == b"multipart/form-data":
        scan = FormScan(content_type)
    elif content_type is not None and inflate is not None:
        scan = JsonScan()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if content_type is not None and scan is None and more:
            scan = JsonScan()
        for piece in (data,) if inflate is None else inflate.feed(data):
            if body.size + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            if scan is not None:
                scan.feed(piece)
            elif content_type is not None and piece:
                body.model = model_of_json(piece)
            await body._add(piece)
        if not more:
            break
    if inflate is not None:
        inflate.finish()
    if scan is not None and body.size:
        body.model = scan.finish()
    await body._end()


def _check_head(headers: Headers, max_bytes: int) -> tuple[bytes, bytes]:
    """Return Content-Type and content coding, each empty without one.

    Raises ApiError before any of the body is asked for.
    """
    length = framing = content_type = coding = b""
    for name, value in headers:
        if name == b"content-length":
            length = value
        elif name == b"transfer-encoding":
            framing = value
        elif name == b"content-type":
            content_type = value
        elif name == b"content-encoding":
            coding += b", " + value if coding else value
    coding = coding.strip().lower()
    if coding == b"identity":
        coding = b""
    if coding and coding not in CODINGS:
        shown = coding.decode("latin-1")
        raise ApiError(415, f"Content-Encoding {shown!r} is not supported: use gzip, deflate or none")
    if length and framing:
        raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other")
    if length and not length.isdigit():
        raise ApiError(400, f"Content-Length {length.decode('latin-1')!r} is no number")
    if length and int(length) > max_bytes:
        raise _too_large(max_bytes)
    return content_type, coding


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes")
