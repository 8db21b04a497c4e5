"""The file with clients' keys is followed while the gateway runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from gateway_kit import until

from llamastead.gateway import keyfile
from llamastead.gateway.auth import Keys
from llamastead.gateway.keyfile import follow_key_file, read_keys
from llamastead.shared.settings import load_settings


@pytest_asyncio.fixture
async def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Path, Keys]]:
    """A file with one key that is followed, and the keys as they are taken from it."""
    monkeypatch.setattr(keyfile, "LOOK_S", 0.01)
    path = tmp_path / "keys"
    path.write_text("# clients\nold\n")
    settings = load_settings({"api_key_file": path, "admin_keys": ("boss",)})
    keys = read_keys(settings)
    following = asyncio.ensure_future(follow_key_file(settings, keys))
    await asyncio.sleep(0)
    yield path, keys
    following.cancel()


async def test_keys_are_rotated_without_a_restart(followed: tuple[Path, Keys]) -> None:
    """Replace the file, also by renaming another one over it: the new keys count, admin keys stay."""
    path, keys = followed
    path.write_text("old\nnew\n")
    await until(lambda: keys.inference == ("new", "old"), "both keys")
    other = path.with_name("other")
    other.write_text("new\n")
    other.rename(path)
    await until(lambda: keys.inference == ("new",), "the new key alone")
    assert keys.admin == ("boss",)


async def test_a_file_that_says_nothing_changes_nothing(
    followed: tuple[Path, Keys], caplog: pytest.LogCaptureFixture
) -> None:
    """Empty the file, then remove it: the old keys go on, the log says so, and never names a key."""
    path, keys = followed
    path.write_text("# nobody\n")
    await until(lambda: len(caplog.records) == 1, "a warning")
    path.unlink()
    await until(lambda: len(caplog.records) == 2, "another one")
    assert keys.inference == ("old",)
    assert "old" not in " ".join(str(vars(record)) for record in caplog.records).replace("keys stay", "")
    path.write_text("new\n")
    await until(lambda: keys.inference == ("new",), "the new key")
