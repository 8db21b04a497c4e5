"""The scripts' headers, the wrappers that call them, and the loader between them."""

import ast
import errno
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from llamastead.shared.store import conversations, downloads, gateway, jobs, leader
from llamastead.shared.store.errors import Code, StoreRefusal, refusal
from llamastead.shared.store.scripts import FOLDER, ScriptError, Scripts, load, load_all

VERBS = sorted(path.stem for path in FOLDER.glob("*.lua"))


def calls() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return verb → (names of keys, names of arguments) as the wrappers' sources pass them."""
    found = {}
    for module in (conversations, downloads, gateway, jobs, leader):
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("call", "_as_leader") or not isinstance(node.args[0], ast.Constant):
                continue
            keys, argv = (tuple(key.value for key in names.keys) for names in node.args[1:3])
            if node.func.attr == "_as_leader":
                keys, argv = ("leader", *keys), ("token", *argv)
            assert node.args[0].value not in found, "one wrapper per script"
            found[node.args[0].value] = keys, ("prefix", *argv)
    return found


def test_every_script_has_one_wrapper_that_passes_what_its_header_names() -> None:
    """Compare the names in each header with the names in the source of its wrapper."""
    assert calls() == {verb: (load(verb).keys, load(verb).argv) for verb in VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_header_says_what_comes_back_and_what_is_emitted(verb: str) -> None:
    """Look for the other two lines of a header, and for an answer with each refusal that the body gives."""
    text = (FOLDER / f"{verb}.lua").read_text()
    header = text[: text.index("\n", text.rindex("\n-- "))]
    assert "-- Returns: " in header
    assert "-- Emits: " in header
    for code in Code:
        given = code.name in text.replace(header, "") or (
            code is Code.STALE_LEADER and "fence" in load(verb).includes
        )
        assert given == (code.name in header), code


@pytest.mark.parametrize("verb", VERBS)
def test_script_includes_what_it_uses_and_uses_what_it_includes(verb: str) -> None:
    """Collect the functions that parts define; the script and its parts call exactly those of its parts."""
    defined = {
        part.stem: set(re.findall(r"^local (?:function )?(\w+)", part.read_text(), re.MULTILINE))
        for part in (FOLDER / "include").glob("*.lua")
    }
    script = load(verb)
    own = (FOLDER / f"{verb}.lua").read_text()
    parts = {part: (FOLDER / "include" / f"{part}.lua").read_text() for part in script.includes}
    for part, names in defined.items():
        others = [own, *(text for name, text in parts.items() if name != part)]
        code = "\n".join(line for text in others for line in text.splitlines() if not line.startswith("--"))
        used = any(re.search(rf"\b{name}\b", code) for name in names)
        if part == "fence":
            assert (part in parts) == ("token" in script.argv and verb != "lead")
        elif part in parts:
            assert used, f"{part} is included for nothing"
        else:
            assert not any(re.search(rf"\b{name}\(", code) for name in names), f"{part} is missing"


@pytest.mark.parametrize("verb", VERBS)
def test_only_bounded_commands(verb: str) -> None:
    """No script may walk the whole keyspace or unpack a list of unbounded length."""
    body = load(verb).body
    assert not re.search(r"'(KEYS|SCAN|FLUSHALL|FLUSHDB)'", body)


def test_loader_names_the_file_of_a_missing_part(tmp_path: Path) -> None:
    """Load scripts with a missing include, a doubled one, no header, and none at all."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "part.lua").write_text("local part = 1\n")
    (tmp_path / "lost.lua").write_text("-- KEYS: a\n-- ARGV: prefix\n-- @include nowhere\nreturn 1\n")
    (tmp_path / "twice.lua").write_text(
        "-- KEYS: a\n-- ARGV: prefix\n-- @include part\n-- @include part\nreturn 1\n"
    )
    (tmp_path / "bare.lua").write_text("return 1\n")
    for verb, why in [("lost", "nowhere"), ("twice", "twice"), ("bare", "header"), ("none", "no script")]:
        with pytest.raises(ScriptError, match=rf"{verb}\.lua.*{why}|{why}.*{verb}\.lua"):
            load(verb, tmp_path)


def test_loader_binds_the_names_of_the_header(tmp_path: Path) -> None:
    """A script of two keys and continued arguments gets a local for each, and the codes it mentions."""
    (tmp_path / "verb.lua").write_text(
        "-- Says no.\n-- KEYS: a b\n-- ARGV: prefix x\n-- ARGV: y\nreturn {NO_HERD}\n"
    )
    script = load("verb", tmp_path)
    assert (script.keys, script.argv) == (("a", "b"), ("prefix", "x", "y"))
    assert script.body.startswith(
        "local a, b = KEYS[1], KEYS[2]\nlocal prefix, x, y = ARGV[1], ARGV[2], ARGV[3]\n"
    )
    assert "local NO_HERD = -2" in script.body
    assert "UNKNOWN_MODEL" not in script.body


def test_each_code_has_its_own_refusal() -> None:
    """Every code becomes a refusal of its own class."""
    made = [type(refusal(code, ["limit", "1"])) for code in Code]
    assert len(set(made)) == len(Code)
    assert all(issubclass(kind, StoreRefusal) for kind in made)


async def test_a_process_that_may_open_no_more_files_has_its_scripts(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call a script for the first time when no file can be read any more."""
    load.cache_clear()
    load_all.cache_clear()
    scripts = Scripts(redis, "p:")

    def refuse(*_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    keys = {"leader": "p:leader", "leadership": "p:leadership"}
    with pytest.raises(StoreRefusal):
        await scripts.call("renew", keys, {"token": "t", "ttl_ms": "1", "info": "{}"})


async def test_call_with_other_names_than_the_header_is_refused() -> None:
    """Calling with a key too few fails before anything is sent."""
    with pytest.raises(ScriptError, match="release"):
        await Scripts(Redis(), "p:").call("release", {}, {})
