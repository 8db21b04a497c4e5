"""What we say of option values against what the real engine says: nothing that it takes is doubted."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from llamastead.supervisor.engine import Engine, find_engine
from llamastead.supervisor.registry.options import Option

UNKNOWN = "--no-such-option"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The installed engine with its option table."""
    return find_engine(None)


def refuses(engine: Engine, option: Option, value: str) -> bool:
    """Whether the engine stops at this value, and not at the unknown option behind it."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("LLAMA_")}
    words = [str(engine.path), option.names[-1], value, UNKNOWN]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return f"invalid argument: {UNKNOWN}" not in done.stderr + done.stdout


def test_what_is_doubted_is_refused_by_the_engine(engine):
    """Give every option a word that is no value; each that we doubt the engine refuses too."""
    doubted = [option for option in engine.options.options if option.doubt("lots")]
    assert len(doubted) > 100
    assert {"ctx-size", "n-gpu-layers", "flash-attn", "cache-type-k", "temperature"} <= {
        o.canonical for o in doubted
    }
    with ThreadPoolExecutor(2) as pool:
        taken = pool.map(lambda option: not refuses(engine, option, "lots"), doubted)
    assert [o.canonical for o, was in zip(doubted, taken, strict=True) if was] == []


@pytest.mark.parametrize("value", ["on", "auto", "-1", "none", "0.5"])
def test_words_that_the_engine_takes_are_not_doubted(engine, value):
    """Give all options whose values we know some word; what we doubt the engine refuses."""
    known = [option for option in engine.options.options if option.doubt("lots") and option.doubt(value)]
    with ThreadPoolExecutor(2) as pool:
        taken = pool.map(lambda option: not refuses(engine, option, value), known)
    assert [o.canonical for o, was in zip(known, taken, strict=True) if was] == []
