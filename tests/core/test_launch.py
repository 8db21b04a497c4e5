"""How an instance is started: command line, environment, files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from help_text import HELP, TABLE
from hypothesis import given
from hypothesis import strategies as st

from llamastead.shared.secret import instance_key
from llamastead.shared.words import Source
from llamastead.supervisor.engine import Engine
from llamastead.supervisor.launch import LaunchError, build_spec, instance_environment
from llamastead.supervisor.placement import Spot
from llamastead.supervisor.registry.model import ModelEntry
from llamastead.supervisor.registry.options import parse_help

SECRET = b"s" * 64
RUN = Path("/run/ls")
SOCKET = "/run/ls/i/box-1-1/e.sock"
ENGINE = Engine(Path("/opt/llama-server"), "1", TABLE)


@dataclass(frozen=True)
class Times:
    """The settings that a launch reads."""

    stop_timeout: float = 10.0
    orphan_grace: float = 60.0


def entry(options=None, **fields):
    """Return an entry with a model and these options."""
    return ModelEntry("m", Source.PRESET, {"model": "/m.gguf", **(options or {})}, revision="r", **fields)


def spec(model, engine=ENGINE, environ=None, run=RUN):
    """Return the spec of a model as instance box-1-1."""
    return build_spec(model, engine, "box-1-1", "n" * 32, run, SECRET, Times(), environ or {})


def test_the_command_line_of_a_plain_model():
    """Build the spec of a model with one option and compare all words."""
    assert spec(entry({"ctx-size": "512"})).argv == (
        *("/opt/llama-server", "--cors-origins", "localhost", "--host", SOCKET, "--log-colors", "off"),
        *("--metrics", "--sse-ping-interval", "5", "--alias", "m", "--ctx-size", "512"),
        *("--cache-ram", "1024", "--log-verbosity", "4", "--model", "/m.gguf"),
    )


def test_what_is_forced_wins_and_what_is_a_default_does_not():
    """Give options that Llamastead forces, and some that it only sets where nobody has."""
    options = {"cors-origins": "*", "metrics": "off", "log-verbosity": "2", "log-colors": "on"}
    options |= {"log-disable": "1", "cache-ram": "7", "sse-ping-interval": "9", "tags": "x"}
    words = " ".join(spec(entry(options)).argv)
    for expected in ("--cors-origins localhost", "--metrics", "--log-verbosity 4", "--log-colors off"):
        assert expected in words
    for expected in ("--cache-ram 7", "--sse-ping-interval 9", "--tags x"):
        assert expected in words
    assert "--log-disable" not in words
    assert "--log-verbosity 5" in " ".join(spec(entry({"log-verbosity": "5"})).argv)
    assert "--log-verbosity 4" in " ".join(spec(entry({"log-verbosity": "all"})).argv)


def test_a_default_yields_to_the_variable_of_its_option():
    """Set the prompt cache by its variable: the variable passes and no word overrides it."""
    built = spec(entry(), environ={"LLAMA_ARG_CACHE_RAM": "9"})
    assert "--cache-ram" not in built.argv
    assert built.env["LLAMA_ARG_CACHE_RAM"] == "9"


def test_options_that_an_engine_lacks_are_not_forced_on_it():
    """Build for an engine without ping interval, colours and origins."""
    lines = HELP.splitlines()
    for name in ("--sse-ping-interval", "--log-colors", "--cors-origins", "-cram"):
        at = next(index for index, line in enumerate(lines) if line.startswith(name))
        del lines[at]
        while lines[at].startswith(" "):
            del lines[at]
    old = replace(ENGINE, options=parse_help("\n".join(lines)))
    assert spec(entry(), old).argv == (
        *("/opt/llama-server", "--host", SOCKET, "--metrics", "--alias", "m"),
        *("--log-verbosity", "4", "--model", "/m.gguf"),
    )


ROUTER_VARIABLES = {
    "LLAMA_ARG_SSL_KEY_FILE": "/k",
    "LLAMA_ARG_SSL_CERT_FILE": "/c",
    "LLAMA_ARG_HOST": "0.0.0.0",
    "LLAMA_ARG_PORT": "8080",
    "LLAMA_ARG_API_PREFIX": "/p",
    "LLAMA_API_KEY": "gateway-key",
    "LLAMA_ARG_MODELS_DIR": "/d",
    "LLAMA_ARG_MODELS_PRESET": "/p.ini",
    "LLAMA_ARG_MODELS_MAX": "1",
    "LLAMA_ARG_NO_MODELS_AUTOLOAD": "1",
    "LLAMA_ARG_MODEL": "/other.gguf",
    "LLAMA_ARG_MMPROJ": "/p",
    "LLAMA_ARG_ALIAS": "x",
    "LLAMA_ARG_LOG_FILE": "/l",
    "LLAMA_ARG_UNHEARD_OF": "1",
    "LLAMA_SERVER_CHILD_MODE": "download",
    "LLAMASTEAD_ADMIN_KEYS": "admin-key",
    "XDG_CONFIG_HOME": "/home/me/.config",
    "AWS_SECRET_ACCESS_KEY": "s",
}
PASSED = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LANG": "C",
    "LC_ALL": "C",
    "TMPDIR": "/tmp",
    "LD_LIBRARY_PATH": "/lib",
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "HIP_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "1",
    "VK_ICD_FILENAMES": "/v",
    "GGML_VK_VISIBLE_DEVICES": "0",
    "HF_TOKEN": "t",
    "LLAMA_ARG_CTX_SIZE": "99",
    "LLAMA_ARG_NO_MMAP": "1",
}


def test_c96_router_variables_never_reach_the_instance():
    """Build with variables of the router, of listening and of keys among those that may pass."""
    built = spec(entry(), environ=ROUTER_VARIABLES | PASSED)
    assert built.env == PASSED | {
        "LLAMA_SERVER_ROUTER_PORT": "0",
        "GGML_NO_BACKTRACE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "XDG_CONFIG_HOME": "/run/ls/i/box-1-1/config",
        "LLAMA_API_KEY": instance_key(SECRET, "box-1-1", "n" * 32),
    }


def test_c97_a_port_variable_does_not_move_an_instance():
    """Build with port and host variables: the instance listens on its own socket and nowhere else."""
    built = spec(entry(), environ={"LLAMA_ARG_PORT": "8080", "LLAMA_ARG_HOST": "0.0.0.0"})
    assert built.argv[built.argv.index("--host") + 1] == SOCKET
    assert "--port" not in built.argv
    assert not {"LLAMA_ARG_PORT", "LLAMA_ARG_HOST"} & built.env.keys()


@given(st.dictionaries(st.sampled_from(sorted(ROUTER_VARIABLES)), st.text("ab/", min_size=1)))
def test_c96_no_combination_of_router_variables_passes(environ):
    """Draw router variables with any values; none passes."""
    switches = {"LLAMA_SERVER_ROUTER_PORT": "0", "GGML_NO_BACKTRACE": "1"}
    switches["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    assert instance_environment(environ, TABLE) == switches


def test_a_presets_own_variables_pass_but_never_replace_ours():
    """Build a model whose preset sets variables, ours among them."""
    env = {"CUDA_VISIBLE_DEVICES": "1", "LLAMA_API_KEY": "mine", "XDG_CONFIG_HOME": "/x"}
    built = spec(entry(env=env), environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert built.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert built.env["LLAMA_API_KEY"] == instance_key(SECRET, "box-1-1", "n" * 32)
    assert built.env["XDG_CONFIG_HOME"] == "/run/ls/i/box-1-1/config"


def test_the_order_for_the_holder_is_plain_json():
    """Compare the message of a spec after a round trip, and its key facts."""
    built = spec(entry(stop_timeout=3.0))
    message = json.loads(json.dumps(built.message()))
    assert set(message) == {
        *("instance", "model", "nonce", "revision", "spec_hash", "argv", "env", "cwd", "socket", "address"),
        *("stop_timeout_s", "orphan_grace_s", "log_path", "log_bytes", "place", "needs"),
    }
    assert (message["stop_timeout_s"], message["orphan_grace_s"]) == (3.0, 60.0)
    assert message["log_path"] == "/run/ls/logs/m.log"
    assert (built.address, built.folder) == (f"unix:{SOCKET}", Path(SOCKET).parent)
    assert spec(entry()).stop_timeout_s == 10.0


def test_the_key_is_in_the_environment_only():
    """Look for the key of an instance in everything but its own variable; the hash must not depend on it."""
    built = spec(entry())
    key = built.env["LLAMA_API_KEY"]
    rest = replace(built, env={name: value for name, value in built.env.items() if name != "LLAMA_API_KEY"})
    assert key not in json.dumps(rest.message())
    other = build_spec(entry(), ENGINE, "box-1-1", "n" * 32, RUN, b"t" * 64, Times(), {})
    assert other.spec_hash == built.spec_hash
    assert spec(entry({"ctx-size": "1"})).spec_hash != built.spec_hash


def test_c139_no_time_limit_is_a_long_one_to_the_engine():
    """Start with a time-out of 0, -1 and 5: the engine takes the first two literally (C139)."""
    for asked, passed in (("0", "1000000000"), ("-1", "1000000000"), ("5", "5")):
        argv = spec(entry({"timeout": asked})).argv
        assert argv[argv.index("--timeout") + 1] == passed


def test_a_model_that_can_not_be_started_is_refused_in_words():
    """Build without a model, with an option the engine lacks, and in a run folder that is too deep."""
    with pytest.raises(LaunchError, match=r"\[m\] names no model; add"):
        spec(ModelEntry("m", Source.PRESET, {}))
    assert "--gpt-oss-20b-default" in spec(ModelEntry("m", Source.PRESET, {"gpt-oss-20b-default": "on"})).argv
    with pytest.raises(LaunchError, match=r"/opt/llama-server of \[m\] has no option --frobnicate"):
        spec(entry({"frobnicate": "1"}))
    there = Path(__file__)
    with pytest.raises(LaunchError, match=r"m can't be loaded: /no/shard, /no/mmproj not found"):
        spec(entry(files=(there, Path("/no/shard"), Path("/no/mmproj"))))
    with pytest.raises(LaunchError, match=r"too long for a unix socket; use a shorter --run-dir"):
        spec(entry(), run=Path("/" + "x" * 90))


FIT = "-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory\n"
FIT_TARGET = (
    "-fitt, --fit-target MiB0,MiB1,MiB2,...\n"
    "                                        target margin per device for --fit\n"
    "                                        (env: LLAMA_ARG_FIT_TARGET)\n"
)


def placed(*names, environ=None, **options):
    """Return the spec of a model on these of the ledger's GPUs; gpu0 spares 1024 MiB, gpu1 512."""
    spot = Spot(
        "",
        {f"CUDA{k}": name for k, name in enumerate(names)},
        {"CUDA_VISIBLE_DEVICES": "x"},
        {"device": None},
    )
    engine = replace(ENGINE, options=parse_help(HELP + FIT_TARGET))
    model = entry({name.replace("_", "-"): value for name, value in options.items()})
    spared = {"gpu0": 1024, "gpu1": 512}
    arguments = (model, engine, "box-1-1", "n" * 32, RUN, SECRET, Times(), environ or {})
    return build_spec(*arguments, spot=spot, spared_mib=spared)


def test_an_engine_leaves_free_what_the_ledger_does():
    """Place it on one GPU, on two, on the host; the preset's own word and the variable's win."""
    assert "--fit-target 512" in " ".join(placed("gpu1").argv)
    assert "--fit-target 1024,512" in " ".join(placed("gpu0", "gpu1").argv)
    assert "--fit-target" not in placed().argv
    assert "--fit-target 7" in " ".join(placed("gpu1", fit_target="7").argv)
    assert "--fit-target" not in placed("gpu1", environ={"LLAMA_ARG_FIT_TARGET": "7"}).argv


def test_c76_what_names_devices_by_other_numbers_is_taken_away():
    """Name a device in the preset and by its variable: the instance sees one, by what it is shown."""
    built = placed(
        "gpu1", device="CUDA1", environ={"LLAMA_ARG_DEVICE": "CUDA1", "CUDA_VISIBLE_DEVICES": "0,1"}
    )
    assert "--device" not in built.argv
    assert "LLAMA_ARG_DEVICE" not in built.env
    assert built.env["CUDA_VISIBLE_DEVICES"] == "x"


@pytest.mark.parametrize(("said", "gets"), [(None, "4096"), ("0", "4096"), ("777", "777")])
def test_the_context_that_memory_allows_stands_where_the_preset_leaves_it_open(said, gets):
    """Say nothing, 0 (which means the model's own), and a number: only the number is the preset's word."""
    model = entry({"ctx-size": said} if said else {})
    built = build_spec(model, ENGINE, "box-1-1", "n" * 32, RUN, SECRET, Times(), {}, context=4096)
    assert f"--ctx-size {gets}" in " ".join(built.argv)


def test_what_is_measured_on_the_host_is_not_fitted_again():
    """Build without fitting: the word is there, unless the preset has its own, or the engine knows none."""
    engine = replace(ENGINE, options=parse_help(HELP + FIT))
    built = [
        build_spec(model, each, "box-1-1", "n" * 32, RUN, SECRET, Times(), {}, fit=False)
        for model, each in ((entry(), engine), (entry({"fit": "on"}), engine), (entry(), ENGINE))
    ]
    assert ["--fit off" in " ".join(spec.argv) for spec in built] == [True, False, False]
    assert "--fit on" in " ".join(built[1].argv)


def test_no_two_instances_share_a_key() -> None:
    """Change secret, instance or nonce: each makes another key; the same three make the same one."""
    keys = {
        instance_key(secret, instance, nonce)
        for secret in (SECRET, b"another" * 9)
        for instance in ("box-1-1", "box-1-2")
        for nonce in ("n" * 32, "m" * 32)
    }
    assert len(keys) == 8
    assert instance_key(SECRET, "box-1-1", "n" * 32) in keys
