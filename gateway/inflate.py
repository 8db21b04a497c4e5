"""Decodes compressed request bodies piece by piece, so that a small body that grows huge costs no memory."""

import zlib
from collections.abc import Iterator

PIECE_BYTES = 256 * 1024
"""The most that is decoded at once."""

# What zlib calls the wrappers of RFC 9110's content codings.
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
CODINGS = frozenset(_WINDOW_BITS)


class BrokenCoding(ValueError):  # noqa: N818
    """The body isn't what its Content-Encoding says."""


class Inflate:
    """One body: `feed` every piece in order, then `finish`."""

    def __init__(self, coding: bytes) -> None:
        """Take a content coding, one of CODINGS."""
        self._bits = _WINDOW_BITS[coding]
        self._member = zlib.decompressobj(self._bits)
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` decodes to, in pieces of at most PIECE_BYTES. Raises BrokenCoding."""
        while data:
            if self._member.eof:
                # gzip files may be joined end to end, and so may gzip bodies.
                self._member = zlib.decompressobj(self._bits)
            self._begun = True
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise BrokenCoding(str(error)) from None
            data = self._member.unconsumed_tail or self._member.unused_data
            if piece:
                yield piece
        # A piece of just the largest size may have left more behind, all of its input being used.
        while not self._member.eof and (piece := self._member.decompress(b"", PIECE_BYTES)):
            yield piece

    def finish(self) -> None:
        """Raise BrokenCoding when the body ended too early; an empty body is whole."""
        if self._begun and not self._member.eof:
            raise BrokenCoding("it ends too early")
