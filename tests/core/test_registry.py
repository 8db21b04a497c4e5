"""The registry: precedence, names, keys, and what is refused or reported."""

import os
from pathlib import Path

import pytest
from help_text import TABLE

from llamastead.shared.words import Source
from llamastead.supervisor.launch import instance_environment
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import RegistryError, Severity, Sources
from llamastead.supervisor.registry.options import Option, OptionTable
from llamastead.supervisor.registry.render import preset_text, wire_args


@pytest.fixture
def load(tmp_path):
    """Return a function: preset text, options for all, files of the models folder → Registry."""

    def load_from(text, *arguments, files=()):
        for name in files:
            file = tmp_path / "models" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        preset = tmp_path / "m.ini"
        preset.write_text(text)
        folder = tmp_path / "models" if files else None
        return load_registry(Sources(folder, preset, arguments), TABLE)

    return load_from


def told(registry):
    """Return the problems without the folder of their file."""
    return [f"{Path(problem.where).name}: {problem.message}" for problem in registry.problems]


def test_each_layer_wins_over_the_one_below(load, tmp_path):
    """Set options in `[*]`, the models folder, a section and the command line, and compare what holds."""
    text = "[*]\nmodel = /shared.gguf\nc = 1\nb = 1\nt = 1\n[one]\nctx-size = 2\nt = 2\n"
    entry = load(text, "-t", "3", files=["one.gguf"]).entries["one"]
    assert entry.source is Source.PRESET
    assert entry.options == {
        "model": str(tmp_path / "models" / "one.gguf"),
        "batch-size": "1",
        "ctx-size": "2",
        "threads": "3",
    }
    assert entry.path == tmp_path / "models" / "one.gguf"


def test_a_section_without_a_file_of_its_name_is_a_model_of_its_own(load):
    """Load a folder's model and a preset one and list both in order of name."""
    registry = load("[b]\nmodel = /b.gguf\n", files=["c.gguf", "a/a.gguf"])
    assert {name: entry.source for name, entry in registry.entries.items()} == {
        "a": Source.MODELS_DIR,
        "b": Source.PRESET,
        "c": Source.MODELS_DIR,
    }


def test_of_several_names_of_an_option_the_last_in_byte_order_wins(load):
    """Set one option by three names in an order of our own, and by one name twice."""
    text = "[a]\nctx-size = 7\nc = 5\nLLAMA_ARG_CTX_SIZE = 9\nt = 1\nt = 2\n"
    assert load(text).entries["a"].options == {"ctx-size": "7", "threads": "2"}


def test_negations_turn_their_value_round(load):
    """Set flags by their negations with true, false and odd values."""
    text = "[a]\nno-mmap = on\nno-warmup = off\nnkvo = what\nLLAMA_ARG_NO_JINJA = 1\n"
    expected = {"mmap": "false", "warmup": "true", "kv-offload": "true", "jinja": "false"}
    assert load(text).entries["a"].options == expected


def test_c91_aliases_lead_to_their_model_and_are_listed(load):
    """Resolve a model by its name and both aliases."""
    registry = load("[Qwen3-8B]\nmodel = /q.gguf\nalias = chat,coder , chat\ntags = b, a\n")
    entry = registry.entries["Qwen3-8B"]
    assert [registry.resolve(name) for name in ("Qwen3-8B", "chat", "coder", "no")] == [
        entry,
        entry,
        entry,
        None,
    ]
    assert (entry.aliases, entry.tags) == (("chat", "coder"), ("a", "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nalias = b\n[b]\n", r"m.ini:1: alias 'b' of \[a\] is a name of \[b\] too \(.*m.ini:3\)"),
        ("[a]\nalias = x\n\n[b]\nalias = x\n", r"m.ini:4: alias 'x' of \[b\] is a name of \[a\] too"),
        ("[a]\nalias = one\n", r"m.ini:1: alias 'one' of \[a\] is a name of \[one\] too \(.*one.gguf\)"),
    ],
)
def test_two_models_of_one_name_refuse_the_start(load, text, message):
    """Give an alias that is another's name or alias, and expect both places."""
    with pytest.raises(RegistryError, match=message):
        load(text, files=["one.gguf"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "ctx_size = 1",
            r"m.ini:2: option 'ctx_size' not recognized in section .*'ctx-size'",
        ),
        ("CTX-SIZE = 1", r"m.ini:2: .*did you mean 'ctx-size'\?"),
        ("unload-afer = 1", r"m.ini:2: .*did you mean 'unload-after'\?"),
        ("ttl = 300", r"m.ini:2: .*did you mean 'unload-after'\?"),
        ("keep_alive = 5m", r"m.ini:2: .*did you mean 'unload-after'\?"),
        ("num_ctx = 1", r"m.ini:2: .*did you mean 'ctx-size'\?"),
        ("unlisted = true", r"m.ini:2: .*did you mean 'hidden'\?"),
        ("cmd = llama-server -c 1", r"m.ini:2: .*; write each option of the command as a key.*"),
        ("zzzzzz = 1", r"m.ini:2: option 'zzzzzz' not recognized in section \[a\]$"),
        ("control-vector-layer-range = 1 2", "m.ini:2: .*takes 2 values"),
        ("pin = perhaps", "m.ini:2: pin = perhaps: expected true or false"),
        ("priority = high", "m.ini:2: .*expected a whole number"),
        ("max-wait = inf", "m.ini:2: .*expected seconds"),
        ("unload-after = -2", "m.ini:2: .*expected seconds"),
        ("memory-max = much", "m.ini:2: .*expected a size"),
        ("env = A", "m.ini:2: .*expected NAME=value"),
        ("env = A='x", "m.ini:2: .*"),
        ("env = LLAMA_ARG_HOST=0.0.0.0", "m.ini:2: env may not set LLAMA_ARG_HOST"),
        ("env = LLAMA_SERVER_ROUTER_PORT=1", "m.ini:2: env may not set LLAMA_SERVER_ROUTER_PORT"),
        ("engine =", "m.ini:2: .*expected a path"),
        ("engine = ~nobody-of-this-name/e", "m.ini:2: .*no such user"),
        ("model = a\0b", "m.ini:2: .*NUL character"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(load, line, message):
    """Load a section with one bad line."""
    with pytest.raises(RegistryError, match=message):
        load(f"[a]\n{line}\n")


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "/" + "b" * 5000])
def test_a_file_name_that_no_system_takes_is_one_models_fault(load, tmp_path, name):
    """Name files longer than a name or a path may be, also through a link: the other models stay."""
    (tmp_path / "linked.gguf").symlink_to("c" * 300 + ".gguf")
    registry = load(f"[a]\nmodel = {name}\n[b]\nmodel = one.gguf\nmmproj = {name}\n", files=["one.gguf"])
    assert set(registry.entries) == {"a", "b", "one"}
    told = [odd.message for odd in registry.problems if odd.severity is Severity.ERROR]
    assert sum("doesn't exist" in message for message in told) >= 2


def test_all_bad_lines_are_told_at_once(load):
    """Load a file with two bad lines and expect both."""
    with pytest.raises(RegistryError, match=r"(?s)m.ini:2: .*\n.*m.ini:4: "):
        load("[a]\nfoo = 1\n[b]\nbar = 1\n")


def test_our_own_keys_become_fields_and_never_options(load):
    """Set each of our keys and the router's, and compare the entry."""
    text = (
        "[*]\nhidden = off\nload-on-startup = on\n"
        "[a]\nmodel = /a.gguf\nhidden = Yes\npin = 1\npriority = -2\n"
        "unload-after = 1.5\nmax-wait = 60\nmemory-max = 6G\nengine = /opt/llama-server\nstop-timeout = 5x\n"
        'env = CUDA_VISIBLE_DEVICES=0,1 A="b c"\ndevice = CUDA0\ndedup-cache-models = true\n'
    )
    entry = load(text).entries["a"]
    assert entry.options == {"model": "/a.gguf", "device": "CUDA0"}
    assert (entry.hidden, entry.pin, entry.priority, entry.memory_max) == (True, True, -2, 6144)
    assert (entry.unload_after, entry.max_wait, entry.stop_timeout) == (1.5, 60.0, 5.0)
    assert (entry.load_on_startup, entry.dedup_cache_models) == (True, True)
    assert (entry.engine, entry.env) == (
        Path("/opt/llama-server"),
        {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b c"},
    )
    assert load("[a]\nunload-after = -1\n").entries["a"].unload_after == 0.0


def test_c139_a_time_out_of_nothing_is_none(load):
    """Set a model's time-outs to 0, -1 and 1.5, leave one out, then write nonsense: read, told, refused."""
    entry = load("[a]\nfirst-byte-timeout = 0\nidle-timeout = -1\ntotal-timeout = 1.5\n").entries["a"]
    assert (entry.first_byte_timeout, entry.idle_timeout, entry.total_timeout) == (0.0, 0.0, 1.5)
    assert load("[a]\nhidden = no\n").entries["a"].total_timeout is None
    for nonsense in ("abc", "-2", "", "inf"):
        with pytest.raises(RegistryError, match="idle-timeout"):
            load(f"[a]\nidle-timeout = {nonsense}\n")


def test_odd_values_are_warned_of(load):
    """Set a flag and router keys to words they don't know, and read what is told."""
    registry = load("[a]\nmodel = m.ini\njinja = no\nload-on-startup = yes\nstop-timeout = soon\n")
    assert registry.entries["a"].stop_timeout == 10.0
    assert told(registry)[:3] == [
        "m.ini:3: jinja = no: neither true nor false; read as llama-server reads it",
        "m.ini:4: load-on-startup = yes: neither true nor false, read as false",
        "m.ini:5: stop-timeout = soon: expected seconds, 10 are taken",
    ]


def test_values_that_the_engine_would_refuse_are_told_at_the_start(load):
    """Set numbers, choices and switches to words they can't be: the model is listed, each is an error."""
    text = "[a]\nmodel = m.ini\nctx-size = lots\nlog-colors = perhaps\nngl = all\nb =\ntemp = .5\n"
    registry = load(text)
    assert list(registry.entries) == ["a"]
    assert [str(p).rpartition("/")[2] for p in registry.problems if p.severity is Severity.ERROR][:3] == [
        "m.ini:3: ctx-size = lots: expected a number",
        "m.ini:4: log-colors = perhaps: expected one of auto, off, on",
        "m.ini:6: b = : expected a number",
    ]
    with pytest.raises(RegistryError, match="command line: --ctx-size lots: expected a number"):
        load("[a]\n", "-c", "lots")


def test_each_setting_knows_where_it_comes_from(load):
    """Set one option in each place and read the origins of what won."""
    text = "[*]\nb = 1\npin = on\n[one]\nc = 2\nstop-timeout = 3\n"
    registry = load(text, "-t", "3", files=["one.gguf"])
    origins = {key: place.rpartition("/")[2] for key, place in registry.origins["one"].items()}
    assert origins == {
        "model": "models folder",
        "batch-size": "m.ini:2 in [*]",
        "pin": "m.ini:3 in [*]",
        "ctx-size": "m.ini:5",
        "stop-timeout": "m.ini:6",
        "threads": "command line",
    }


def test_a_token_is_no_argument(load):
    """Give the hub's token in a section and on the command line: instances have it in their environment."""
    for registry in (load("[a]\nhf-token = secret\n"), load("[a]\n", "--hf-token", "secret")):
        entry = registry.entries["a"]
        assert (entry.options, entry.env) == ({}, {"HF_TOKEN": "secret"})


def test_c90_no_model_called_default_appears(load):
    """Load a file with a version and options before any section, then one with a real section default."""
    assert list(load("version = 1\nc = 1\nb = 2\n[a]\n").entries) == ["a"]
    registry = load("c = 1\n[default]\nb = 2\n")
    assert registry.entries["default"].options == {"ctx-size": "1", "batch-size": "2"}


def test_c93_options_of_one_model_are_no_options_for_all(load):
    """Give alias, projector and log file on the command line and in `[*]`; each is told and dropped."""
    text = "[*]\nalias = z\n[a]\nmodel = m.ini\n[b]\nmodel = m.ini\n"
    registry = load(text, "--alias", "x", "--mmproj", "/p", "--log-file", "/l", "-c", "5")
    assert [entry.options["ctx-size"] for entry in registry.entries.values()] == ["5", "5"]
    assert registry.aliases == {}
    assert [line.partition(":")[0] for line in told(registry)[:4]] == ["command line"] * 3 + ["m.ini"]
    with pytest.raises(RegistryError, match="--gpt-oss-20b-default fetches a model by itself: name it with"):
        load("[a]\n", "--gpt-oss-20b-default")
    with pytest.raises(RegistryError, match=r"command line: argument --ctx-siz not recognized"):
        load("[a]\n", "--ctx-siz", "1")


def test_a_model_of_the_command_line_is_registered_and_loaded_at_start(load, tmp_path):
    """Name models by -m and -hf with options of their own: these are theirs alone, all others are for all."""
    registry = load("[b]\nmodel = m.ini\n", "-m", "sub/x.gguf", "--mmproj", "p.gguf", "-c", "5")
    x, b = registry.entries["x"], registry.entries["b"]
    assert (x.load_on_startup, b.load_on_startup) == (True, False)
    assert x.options == {"model": "sub/x.gguf", "mmproj": "p.gguf", "ctx-size": "5"}
    assert x.path == Path.cwd() / "sub" / "x.gguf"
    assert b.options == {"model": "m.ini", "ctx-size": "5"}
    named = load("[b]\n", "-m", "/x.gguf", "-a", "chat,other").entries["chat"]
    assert (named.aliases, named.options) == (("other",), {"model": "/x.gguf"})
    assert load("", "-hf", "o/r:q8_0").entries["o/r:Q8_0"].options == {"hf-repo": "o/r:q8_0"}
    merged = load("[x]\nb = 3\npin = on\n", "-m", "/y/x.gguf").entries["x"]
    assert (merged.options, merged.pin) == ({"model": "/y/x.gguf", "batch-size": "3"}, True)


def test_c94_keys_of_the_herd_in_a_section_are_told_not_dropped_in_silence(load):
    """Put settings of the router into `[*]`; each is reported at its line."""
    registry = load("[*]\nmodels-max = 1\nparallel = 1\ntools = all\n[a]\nmodels-autoload = off\n")
    assert registry.entries["a"].options == {"parallel": "1"}
    assert told(registry)[:3] == [
        "m.ini:2: models-max is ignored here: it belongs on Llamastead's own command line",
        "m.ini:4: tools is ignored here: tools that act on this machine stay off, as their routes answer",
        "m.ini:6: models-autoload is ignored here: it belongs on Llamastead's own command line",
    ]


def test_c94_tools_and_servers_of_newer_engines_reach_no_instance(tmp_path):
    """Ask for MCP servers and tools elsewhere in `[*]`, on the command line and by a variable, as engines
    from b11434 on take them: each instance would start them; all are told and dropped.
    """
    names = ("tools-runtime", "mcp-servers-config", "mcp-servers-json")
    variables = {name: f"LLAMA_ARG_{name.upper().replace('-', '_')}" for name in names}
    newer = [Option((f"--{name}",), arity=1, env=env) for name, env in variables.items()]
    table = OptionTable((*TABLE.options, *newer))
    lines = "".join(f"{name} = x\n" for name in names)
    (tmp_path / "m.ini").write_text(f"[*]\n{lines}[a]\nmodel = m.ini\n")
    words = [word for name in names for word in (f"--{name}", "x")]
    registry = load_registry(Sources(None, tmp_path / "m.ini", tuple(words)), table)
    assert registry.entries["a"].options == {"model": "m.ini"}
    of_tools = [line for line in told(registry) if "tools that act on this machine stay off" in line]
    assert len(of_tools) == 2 * len(names)
    assert not {*variables.values()} & {*instance_environment(dict.fromkeys(variables.values(), "x"), table)}


def test_c156_reserved_keys_in_a_section_are_overridden_with_a_warning(load):
    """Set host, port, key and certificate in a section; none reaches the options, each is told."""
    registry = load("[a]\nhost = 0.0.0.0\nport = 80\napi-key = x\nssl-key-file = y\napi-prefix = /p\nc = 1\n")
    assert registry.entries["a"].options == {"ctx-size": "1"}
    assert [line.split(" ")[1] for line in told(registry)[:5]] == [
        "host",
        "port",
        "api-key",
        "ssl-key-file",
        "api-prefix",
    ]
    assert not any("0.0.0.0" in line or "= x" in line for line in told(registry))


def test_a_tag_after_the_last_colon_is_canonical(load):
    """Load sections named like repositories with tags of all sorts."""
    text = "[o/r:ud-q4_k_xl]\n[o/r:big-q4_k_xl]\n[plain:tag]\n[a:b:c-d.e]\n[b:]\n[:c]\n"
    assert sorted(load(text).entries) == [":C", "a:b:E", "b:", "o/r:Q4_K_XL", "o/r:UD-Q4_K_XL", "plain:TAG"]
    with pytest.raises(RegistryError, match=r"m.ini:2: \[o/r:Q8_0\] is the model of .*m.ini:1 again"):
        load("[o/r:q8_0]\n[o/r:Q8_0]\n")


def test_what_can_not_load_is_told(load):
    """Load a model without a path and one whose file is missing."""
    assert told(load("[a]\n[b]\nmodel = /no/b.gguf\n")) == [
        "m.ini:1: [a] names no model: add `model = PATH`",
        "m.ini:2: b: /no/b.gguf doesn't exist",
    ]


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path):
    """Load a preset in a foreign encoding, and none at all."""
    (tmp_path / "m.ini").write_bytes(b"[a]\nmodel = /\xe4.gguf\n")
    with pytest.raises(RegistryError, match=r"m.ini:2: not UTF-8"):
        load_registry(Sources(models_preset=tmp_path / "m.ini"), TABLE)
    with pytest.raises(RegistryError, match=r"no.ini can't be read: No such file"):
        load_registry(Sources(models_preset=tmp_path / "no.ini"), TABLE)


def test_without_sources_there_are_no_models():
    """Load nothing."""
    assert load_registry(Sources(), TABLE).entries == {}


def test_the_revision_changes_exactly_with_what_an_instance_would_notice(load, tmp_path):
    """Compare revisions after changes that matter and after some that don't."""
    model = tmp_path / "x.gguf"
    model.write_bytes(b"1")
    text = f"[a]\nmodel = {model}\nc = 1\n"
    first = load(text).entries["a"].revision
    assert len(first) == 12
    same = ["alias = b\n", "tags = t\n", "pin = on\n", "unload-after = 5\n", "lv = 5\n", "stop-timeout = 3\n"]
    other = ["b = 2\n", "env = A=1\n", "engine = /e\n", "mmproj = /p\n"]
    assert {load(text + more).entries["a"].revision for more in same} == {first}
    assert first not in {load(text + more).entries["a"].revision for more in other}
    assert load(text, "-t", "2").entries["a"].revision != first
    os.utime(model, ns=(1, 1))
    assert load(text).entries["a"].revision != first


def test_the_wire_shows_what_llama_server_would_show(load):
    """Render one entry with flags, negations, tags, a line break in a value, and router keys."""
    text = (
        "[a]\nmodel = /a.gguf\nngl = 7\nno-mmap = true\nmetrics = off\ntags = b , a\nalias = x\n"
        "stop-timeout = 3\nload-on-startup = false\npin = on\n"
    )
    entry = load(text, "--chat-template", "x\ny").entries["a"]
    assert wire_args(entry, TABLE, "/bin/ls") == [
        *("/bin/ls", "--chat-template", "x\ny", "--host", "127.0.0.1", "--no-mmap", "--port", "0"),
        *("--tags", "b , a", "--alias", "a", "--model", "/a.gguf", "--n-gpu-layers", "7"),
    ]
    assert preset_text(entry, TABLE) == (
        "[a]\nchat-template = x\\\ny\nmetrics = off\nmmap = false\nmodel = /a.gguf\nn-gpu-layers = 7\n"
        "load-on-startup = false\nstop-timeout = 3\n\n"
    )


def test_sleeping_is_known_from_the_options(load):
    """Compare entries with and without an idle time."""
    text = "[a]\nsleep-idle-seconds = 5\n[b]\nsleep-idle-seconds = -1\n[c]\n"
    assert [entry.sleeps for entry in load(text).entries.values()] == [True, False, False]
