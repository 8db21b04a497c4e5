"""What changed between two readings of the registry, and whether its sources did."""

import os

import pytest
from help_text import TABLE

from llamastead.supervisor.registry.changes import compare
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import Sources
from llamastead.supervisor.registry.watch import has_vanished, look


@pytest.fixture
def sources(tmp_path):
    """A preset file and a models folder with one model."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "f.gguf").write_bytes(b"1")
    (tmp_path / "m.ini").write_text("[a]\nmodel = /a.gguf\nc = 1\n[b]\nmodel = /b.gguf\n")
    return Sources(tmp_path / "models", tmp_path / "m.ini", (), tmp_path / "hub")


def test_changes_name_models_and_keys(sources):
    """Change options, router keys, own keys and a file, add a model and remove one."""
    before = load_registry(sources, TABLE)
    assert not compare(before, load_registry(sources, TABLE))
    sources.models_preset.write_text(
        "[a]\nmodel = /a.gguf\nc = 2\npin = on\nstop-timeout = 3\nalias = x\nmax-wait = 5\n"
        "[n]\nmodel = /n.gguf\n"
    )
    (sources.models_dir / "f.gguf").write_bytes(b"22")
    changes = compare(before, load_registry(sources, TABLE))
    assert (changes.added, changes.removed) == (("n",), ("b",))
    assert changes.changed == {
        "a": ("aliases", "ctx-size", "max-wait", "pin", "stop-timeout"),
        "f": ("files",),
    }
    assert changes.shown()["added"] == ("n",)


def test_a_look_notices_each_kind_of_change(sources):
    """Touch nothing, then the preset, a model file, its folder, and a repository of the cache."""
    registry = load_registry(sources, TABLE)
    seen = look(sources, registry)
    assert look(sources, registry) == seen
    refs = sources.hub_cache / "models--o--r" / "refs"

    def new_reference():
        refs.mkdir(parents=True)
        (refs / "main").write_text("1")

    changes = (
        lambda: os.utime(sources.models_preset, ns=(1, 1)),
        lambda: (sources.models_dir / "f.gguf").write_bytes(b"333"),
        lambda: (sources.models_dir / "g.gguf").touch(),
        lambda: (sources.models_dir / "sub").mkdir(),
        lambda: (sources.models_dir / "sub" / "x.gguf").touch(),
        new_reference,
        lambda: (refs / "main").write_text("22"),
        lambda: (refs.parent / "snapshots" / "c").mkdir(parents=True),
    )
    for change in changes:
        change()
        now = look(sources, registry)
        assert now != seen
        seen = now


def test_a_source_that_is_gone_is_awaited(sources):
    """Remove the preset file: that is no change; removing a model is one."""
    registry = load_registry(sources, TABLE)
    seen = look(sources, registry)
    (sources.models_dir / "f.gguf").unlink()
    assert not has_vanished(sources, seen, look(sources, registry))
    sources.models_preset.unlink()
    assert has_vanished(sources, seen, look(sources, registry))
