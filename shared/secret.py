"""Keys of instances: derived from one herd secret, so that Redis never holds a key."""

import hashlib
import hmac
import os
import secrets
from functools import cache
from pathlib import Path


def read_or_make_herd_secret(path: Path) -> bytes:
    """Return the herd secret kept at `path`, making it (0600) at first use.

    Two processes that start at once agree: the file appears whole, by a hard link that only one can place.
    Raises OSError when the file can't be read or made, ValueError when it is too short to be a secret.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.touch(mode=0o600)
            draft.write_text(secrets.token_hex(32) + "\n")
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
    return read_herd_secret(path)


@cache
def kept_herd_secret(path: Path) -> bytes:
    """Return what `read_or_make_herd_secret` does, read once: who may open no more files still has it."""
    return read_or_make_herd_secret(path)


def read_herd_secret(path: Path) -> bytes:
    """Return the herd secret kept at `path`; OSError if it can't be read, ValueError if it is too short."""
    secret = path.read_text().strip().encode()
    if len(secret) < 32:
        raise ValueError(f"{path} holds no herd secret: expected at least 32 characters")
    return secret


def instance_key(herd_secret: bytes, instance: str, nonce: str) -> str:
    """Return an instance's API key, hex: HMAC-SHA256 (RFC 2104) of its id and nonce under the secret."""
    return hmac.new(herd_secret, f"{instance} {nonce}".encode(), hashlib.sha256).hexdigest()


def seal(herd_secret: bytes, text: str) -> str:
    """Return what proves, hex, that a text comes from a holder of the secret; compare with `same_key`."""
    return hmac.new(herd_secret, f"sealed {text}".encode(), hashlib.sha256).hexdigest()


def same_key(given: str, expected: str) -> bool:
    """Compare two keys in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())
