"""A repository of presets on the command line: read from the cache, offline, with less trust than a file."""

from help_text import TABLE
from hub_folder import fill

from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import Sources

PRESET = """\
[*]
temp = 0.5
lora = /etc/passwd
[small]
hf-repo = o/r:q8_0
c = 512
engine = /tmp/evil
env = LD_PRELOAD=/tmp/evil.so
log-file = /tmp/x
pin = on
"""


def test_a_preset_repository_is_the_start(tmp_path):
    """Name a cached repository that holds preset.ini: its sections are models, found offline."""
    snapshot = fill(tmp_path, "o/presets", "preset.ini")
    (snapshot / "preset.ini").resolve().write_text(PRESET)
    model = fill(tmp_path, "o/r", "m-Q8_0.gguf") / "m-Q8_0.gguf"
    registry = load_registry(Sources(None, None, ("-hf", "o/presets", "-t", "2"), tmp_path), TABLE)
    assert sorted(registry.entries) == ["o/r:Q8_0", "small"]
    small = registry.entries["small"]
    assert small.path == model
    assert small.options == {"hf-repo": "o/r:q8_0", "ctx-size": "512", "temperature": "0.5", "threads": "2"}
    assert (small.engine, dict(small.env), small.pin) == (None, {}, True)
    ignored = [problem.message.partition(" ")[0] for problem in registry.problems]
    assert sorted(ignored) == ["engine", "env", "log-file", "lora"]


def test_a_tag_or_a_file_names_a_model_not_the_presets(tmp_path):
    """Name the same repository with a tag: it is a model's, whatever presets lie beside it."""
    snapshot = fill(tmp_path, "o/r", "m-Q8_0.gguf", "preset.ini")
    registry = load_registry(Sources(None, None, ("-hf", "o/r:q8_0"), tmp_path), TABLE)
    assert list(registry.entries) == ["o/r:Q8_0"]
    assert registry.entries["o/r:Q8_0"].load_on_startup
    assert not registry.entries["o/r:Q8_0"].may_be_presets
    assert registry.entries["o/r:Q8_0"].path == snapshot / "m-Q8_0.gguf"


def test_a_repository_that_is_not_cached_may_turn_out_to_hold_presets(tmp_path):
    """Name a repository that is not here: it is a model so far, whose presets would go before; a section that
    names a repository is a model in any case.
    """
    (tmp_path / "models.ini").write_text("[small]\nhf-repo = o/r\n")
    sources = Sources(None, tmp_path / "models.ini", ("-hf", "o/presets"), tmp_path)
    entries = load_registry(sources, TABLE).entries
    assert {name: entry.may_be_presets for name, entry in entries.items()} == {
        "o/presets": True,
        "small": False,
    }
