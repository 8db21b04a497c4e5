"""Our listing of models against that of the real router on the same files."""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from llamastead.supervisor.engine import Engine, find_engine
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import RegistryError, Sources
from llamastead.supervisor.registry.render import preset_text, wire_args
from llamastead.supervisor.registry.reserved import RESERVED


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The installed engine with its option table."""
    return find_engine(None)


class Router:
    """The real router on a preset and a folder, asked once."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.models, self.preset = engine, folder / "models", folder / "m.ini"
        self.models.mkdir()
        self.cache = folder / "cache"
        self.cache.mkdir()

    def listing(self, arguments: Sequence[str] = ()) -> dict[str, dict[str, Any]] | None:
        """Return GET /models by name, or None when the router refuses to start."""
        words = ["--models-preset", self.preset, "--models-dir", self.models, "--no-models-autoload"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        with subprocess.Popen(
            [self.engine.path, *words, "--host", "127.0.0.1", "--port", "0", *arguments],
            env=clean | {"LLAMA_CACHE": str(self.cache), "HF_HOME": str(self.cache)},
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            # The loop ends at the end of the output, too: a router that refuses its preset ends by itself.
            for line in process.stderr:
                if address := re.search(rb"listening on (http://127.0.0.1:\d+)", line):
                    break
            else:
                return None
            with urllib.request.urlopen(f"{address[1].decode()}/models", timeout=10) as answer:
                listing = json.load(answer)
            process.kill()
        return {model["id"]: model for model in listing["data"]}


@pytest.fixture
def router(engine: Engine, tmp_path: Path) -> Router:
    """A router whose folder and preset are still empty."""
    return Router(engine, tmp_path)


def ours(router: Router, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what Llamastead would list for the router's files, as far as the configuration decides it."""
    engine = router.engine
    registry = load_registry(
        Sources(router.models, router.preset, tuple(arguments), router.cache), engine.options
    )
    return {
        name: {
            "aliases": list(entry.aliases),
            "tags": list(entry.tags),
            "source": str(entry.source),
            "args": wire_args(entry, engine.options, str(engine.path)),
            "preset": preset_text(entry, engine.options),
        }
        for name, entry in registry.entries.items()
    }


def theirs(router: Router, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the same facts as the router lists them."""
    listing = router.listing(arguments)
    assert listing is not None, "the router refused to start"
    return {
        name: {
            **{key: model[key] for key in ("aliases", "tags", "source")},
            **{key: model["status"][key] for key in ("args", "preset")},
        }
        for name, model in listing.items()
    }


def fill(router: Router, *names: str) -> None:
    """Put tiny models into the router's folder."""
    for name in names:
        file = router.models / name
        file.parent.mkdir(parents=True, exist_ok=True)
        tiny_model(file, 1)


SEED_INI = """\
[llama3]
model = {folder}/llama-3-8b-instruct.Q5_K_M.gguf
ctx-size = 8192
ngl = 35
threads = 8

[mistral]
model = {folder}/mistral-7b-instruct-v0.3.Q4_K_M.gguf
ctx-size = 4096
ngl = 20
threads = 8

[qwen]
model = {folder}/qwen2.5-coder-7b-instruct.Q5_K_M.gguf
ctx-size = 16384
ngl = 35
threads = 8
"""


def test_the_models_ini_that_guides_show_is_read_word_for_word(router):
    """List the three sections that users copy from guides and compare with the router."""
    router.preset.write_text(SEED_INI.format(folder=router.models.parent))
    listed = ours(router, ())
    assert list(listed) == ["llama3", "mistral", "qwen"]
    assert listed == theirs(router, ())
    assert listed["qwen"]["args"][-8:] == [
        *("--ctx-size", "16384", "--model", f"{router.models.parent}/qwen2.5-coder-7b-instruct.Q5_K_M.gguf"),
        *("--n-gpu-layers", "35", "--threads", "8"),
    ]


RICH_INI = """\
version = 1
; presets
[*]  # for all
ctx-size = 512
metrics = on
load-on-startup = false

[a b;#/:x-q4_k]
model = /m/a.gguf
ngl = 7
mmproj-auto = off
warmup = false
no-cont-batching = true
nkvo = 1
kvu = on
alias = y, x,, y
tags = t2 , t1,, t2
jinja = no
stop-timeout = 3
LLAMA_ARG_BATCH = 9
b = 5

[one]
c = 333
ctx-size = 7
temp = 0.5
spm-infill = false
embeddings = false
mlock = 1
mmap = 0
no-slots = what
pooling =
[org/repo:big-q8_0]
hf-repo = org/repo:q8_0
[one-more]
model = /m/b.gguf
load-on-startup = off
"""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-t", "3", "--metrics", "-lv", "3", "--no-mmap", "--jinja", "-fa", "on"),
        (
            "--tags",
            "zz",
            "--chat-template",
            "x\ny",
            "--override-kv",
            "a=int:1",
            "--cache_ram",
            "5",
            "-c",
            "9",
        ),
    ],
)
def test_names_arguments_and_presets_are_the_routers(router, arguments):
    """List a folder and a rich preset under several command lines and compare all that is configured."""
    fill(router, "one.gguf", "two.gguf.gguf", ".hid.gguf", "Q.Q4_K_M.gguf", "sp ace.gguf", "UPPER.GGUF")
    fill(router, "dir/x.gguf", "mm/model.gguf", "mm/mmproj-f16.gguf", "deep/er/z.gguf", "only/mmproj-x.gguf")
    fill(router, "split/x-00001-of-00002.gguf", "split/x-00002-of-00002.gguf")
    router.preset.write_text(RICH_INI.replace("version = 1\n", ""))
    assert ours(router, arguments) == theirs(router, arguments)


def test_every_option_is_rendered_as_the_router_renders_it(router):
    """Set every option of the engine that a preset may hold, by its first name, and compare all words."""
    # What is ours to decide, what names or ends a model, and a secret that is never an argument.
    left_out = {*RESERVED, "alias", "usage", "version", "hf-token"}
    lines = [
        f"{option.names[0].lstrip('-')} = {'on' if option.arity == 0 else '1'}"
        for option in router.engine.options.options
        if option.arity < 2 and option.canonical not in left_out
    ]
    negated = [
        f"{option.negations[0].lstrip('-')} = true"
        for option in router.engine.options.options
        if option.negations and option.canonical not in left_out
    ]
    router.preset.write_text(
        "\n".join(["[all]", *lines, "[not]", *negated, "[off]", *_switched_off(lines), ""])
    )
    assert ours(router, ()) == theirs(router, ())


def _switched_off(lines: list[str]) -> list[str]:
    return [line.replace(" = on", " = false") for line in lines if line.endswith(" = on")]


@pytest.mark.parametrize(
    "text",
    [
        "[a]\n c = 1\n",
        "[a]\nc\n",
        "[]\n",
        "[ ]\n",
        "[a\n",
        "[a] x\n",
        "[a]b]\n",
        "[a]\n--ctx-size = 1\n",
        "[a]\n1c = 1\n",
        "[a]\n= 1\n",
        "\ufeff[a]\n",
        "[a]\nctx_size = 1\n",
        "[a]\nCTX-SIZE = 1\n",
        "[*]\nfrobnicate = 1\n",
        "[a]\ncontrol-vector-layer-range = 1 2\n",
        "[a]\nalias = b\n[b]\n",
        "[a]\nalias = x\n[b]\nalias = x\n",
    ],
)
def test_what_the_router_refuses_is_refused(router, text):
    """Start both on a faulty preset; neither may take it."""
    router.preset.write_text(text)
    assert router.listing() is None
    with pytest.raises(RegistryError, match=r"m\.ini:\d+: "):
        ours(router, ())


def test_what_is_read_otherwise_is_what_the_router_reads_wrongly(router):
    """Read values with comment signs and quotes with both and show the difference that is meant."""
    text = '[a]\nsamplers = top_k;temperature\n[b]\nmodel = "/m/x y.gguf"\n[c]\nsamplers = top_k ; note\n'
    router.preset.write_text(text)
    mine, other = ours(router, ()), theirs(router, ())
    assert [listing["a"]["preset"] for listing in (mine, other)] == [
        "[a]\nsamplers = top_k;temperature\n\n",
        "[a]\nsamplers = top_k\n\n",
    ]
    assert [listing["b"]["preset"] for listing in (mine, other)] == [
        "[b]\nmodel = /m/x y.gguf\n\n",
        '[b]\nmodel = "/m/x y.gguf"\n\n',
    ]
    assert mine["c"] == other["c"]


CACHE = {
    "models--o--r": [
        "m-Q4_K_M.gguf",
        "m.q8_0.gguf",
        "mmproj-F16.gguf",
        "mtp-m-Q8_0.gguf",
        "plain.gguf",
        "x.txt",
    ],
    "models--o--split": [
        "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
        "mmproj-BF16.gguf",
    ],
    "models--o--UP": ["m-Q4_0.GGUF", "ggml-model.gguf"],
    "models--a--dash--b": ["m-Q8_0.gguf"],
    "models--noslash": ["m-Q8_0.gguf"],
}


def test_the_hub_cache_is_listed_as_the_router_lists_it(router):
    """Fill a cache with repositories good and odd, merge a section and a folder, and compare the listings."""
    for folder, names in CACHE.items():
        commit = "0123456789abcdef0123456789abcdef01234567"
        (router.cache / folder / "refs").mkdir(parents=True)
        (router.cache / folder / "refs" / "main").write_text(commit)
        for name in names:
            file = router.cache / folder / "snapshots" / commit / name
            file.parent.mkdir(parents=True, exist_ok=True)
            tiny_model(file, 1)
    fill(router, "one.gguf")
    router.preset.write_text("[*]\nc = 512\n[o/r:q8_0]\nngl = 3\n[mine]\nhf = o/split\n")
    listed = ours(router, ("-t", "2"))
    assert "o/split:BF16" in listed
    assert listed == theirs(router, ("-t", "2"))
