"""Finds the field `model` of a multipart/form-data body piece by piece, wherever it stands."""

import re

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data(.*)$", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(rb';\s*name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_FILE = re.compile(rb";\s*filename\*?=", re.IGNORECASE)
_MAX_PADDING = 256
_MAX_PART_HEAD = 16 * 1024
_MAX_NAME = 16 * 1024


class BrokenForm(ValueError):  # noqa: N818
    """The body isn't the multipart form its Content-Type announces."""


class FormScan:
    """One body's scan: `feed` every piece in order, then `finish`. Memory: a part's head or the name."""

    def __init__(self, content_type: bytes) -> None:
        """Take the boundary from a Content-Type value. Raises BrokenForm when it has none."""
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise BrokenForm("multipart/form-data without a boundary in Content-Type")
        self._delimiter = b"\r\n--" + (found[1] or found[2])
        # The first delimiter has no line before it; with this one it looks like the others.
        self._held = bytearray(b"\r\n")
        self._passed = -2
        self._step = self._seek_delimiter
        self._value: bytearray | None = None
        self._found: str | None = None
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Scan the next piece. Raises BrokenForm."""
        if self._ended:
            return
        self._held += data
        while self._step():
            pass

    def finish(self) -> str | None:
        """Return the last `model` field's text, None without one. Raises BrokenForm on a body cut short."""
        if not self._ended:
            raise BrokenForm(
                f"byte {self._passed + len(self._held)}: the form ends without its closing boundary"
            )
        return self._found

    def _drop(self, count: int) -> None:
        del self._held[:count]
        self._passed += count

    def _seek_delimiter(self) -> bool:
        at = self._held.find(self._delimiter)
        # What could be the beginning of a delimiter stays for the next piece.
        content = at if at >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
        if self._value is not None:
            self._value += self._held[:content]
            if len(self._value) > _MAX_NAME:
                raise BrokenForm(f"byte {self._passed}: the field `model` is longer than {_MAX_NAME} bytes")
        self._drop(content)
        if at < 0:
            return False
        if self._value is not None:
            try:
                self._found = self._value.decode()
            except UnicodeDecodeError:
                raise BrokenForm(f"byte {self._passed}: the field `model` isn't UTF-8") from None
            self._value = None
        self._drop(len(self._delimiter))
        self._step = self._read_boundary_end
        return True

    def _read_boundary_end(self) -> bool:
        if self._held.startswith(b"--"):
            self._ended = True
            self._drop(len(self._held))
            return False
        line = self._held.find(b"\r\n", 0, _MAX_PADDING + 2)
        if line < 0 and len(self._held) < _MAX_PADDING + 2:
            return False
        if line < 0 or self._held[:line].strip(b" \t"):
            raise BrokenForm(f"byte {self._passed}: a boundary must end its line")
        # The line's end stays, so that a part without headers ends its head like any other.
        self._drop(line)
        self._step = self._read_part_head
        return True

    def _read_part_head(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if (end if end >= 0 else len(self._held)) > _MAX_PART_HEAD:
            raise BrokenForm(f"byte {self._passed}: a part's head is longer than {_MAX_PART_HEAD} bytes")
        if end < 0:
            return False
        if _names_model(bytes(self._held[:end])):
            self._value = bytearray()
        self._drop(end + 4)
        self._step = self._seek_delimiter
        return True


def _names_model(head: bytes) -> bool:
    disposition = _DISPOSITION.search(head.replace(b"\r\n", b"\n"))
    if disposition is None or _FILE.search(disposition[1]):
        return False
    name = _NAME.search(disposition[1])
    return name is not None and (name[1] if name[1] is not None else name[2]) == b"model"
