"""Settings: where a value comes from, what is said about a bad one, what children get."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from llamastead.shared.settings import Settings, SettingsError, flag_of, load_settings
from llamastead.supervisor.engine import find_engine
from llamastead.supervisor.registry.load import load_registry
from llamastead.supervisor.registry.model import Sources

pytestmark = pytest.mark.usefixtures("no_settings")


def refused(**given: str) -> str:
    """Return what is said against these settings."""
    with pytest.raises(SettingsError) as refusal:
        load_settings(given)
    return str(refusal.value)


def test_defaults_are_llama_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set nothing: address, port, limit and autoload are those of llama-server."""
    settings = load_settings()
    expected = ("127.0.0.1", 8080, 4, True, None, None)
    assert expected == (
        settings.host,
        settings.port,
        settings.models_max,
        settings.models_autoload,
        settings.models_dir,
        settings.models_preset,
    )


def test_flags_are_spelled_as_llama_server_spells_them() -> None:
    """Compare the flags of the router's settings with llama-server's."""
    router = {"models_dir", "models_preset", "models_max", "models_autoload", "host", "port", "api_key_file"}
    assert {flag_of(name) for name in router} == {f"--{name.replace('_', '-')}" for name in router}
    assert flag_of("api_keys") == "--api-key"


def test_c166_one_limit_whatever_its_source(monkeypatch: pytest.MonkeyPatch, short_tmp: Path) -> None:
    """Set models-max by flag, variables and preset at once: one value wins, and children get just that."""
    monkeypatch.setenv("LLAMA_ARG_MODELS_MAX", "3")
    assert load_settings().models_max == 3
    monkeypatch.setenv("LLAMASTEAD_MODELS_MAX", "2")
    assert load_settings().models_max == 2
    settings = load_settings({"models_max": "1"})
    assert settings.models_max == 1
    for name, value in settings.child_env().items():
        monkeypatch.setenv(name, value)
    assert load_settings().models_max == 1
    preset = short_tmp / "models.ini"
    preset.write_text("[*]\nmodels-max = 9\n")
    registry = load_registry(Sources(models_preset=preset), find_engine(None).options)
    assert "models-max" in str(registry.problems[0])


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set variables to nothing, as compose files do: the defaults stand."""
    for name in ("LLAMASTEAD_REDIS_URL", "LLAMASTEAD_MODELS_MAX", "LLAMA_ARG_PORT", "LLAMA_API_KEY"):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert (settings.models_max, settings.port, settings.api_keys) == (4, 8080, ())
    assert settings.embedded_redis


@pytest.mark.parametrize(("name", "value"), [("MODELS_AUTOLOAD", "false"), ("NO_MODELS_AUTOLOAD", "1")])
def test_autoload_is_turned_off_by_either_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Set the variable and its negation, one at a time."""
    monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    assert load_settings().models_autoload is False


def test_children_get_exactly_these_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand all kinds of values to a child's environment and read them there: nothing is lost or changed."""
    given = {
        "models_dir": "/models",
        "models_autoload": False,
        "api_keys": "k1,k2",
        "unload_after": "90",
        "run_dir": "/tmp/herd",
        "redis_url": "rediss://u:p%40ss@r:6380/1",
        "instance_args": ("--chat-template", "a b'c", "-c", "512"),
    }
    settings = load_settings(given)
    for name, value in settings.child_env().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings
    assert load_settings().instance_args == ("--chat-template", "a b'c", "-c", "512")


@pytest.mark.parametrize("name", ["connect", "first_byte", "idle", "total"])
def test_c139_time_outs_of_nothing_and_nonsense(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Give 0 and -1, nothing, and nonsense as flag and as variable: no limit, default, refused by name."""
    field, variable = f"{name}_timeout", f"LLAMASTEAD_{name.upper()}_TIMEOUT"
    for none in ("0", "-1"):
        assert getattr(load_settings({field: none}), field) <= 0
        monkeypatch.setenv(variable, none)
        assert getattr(load_settings(), field) <= 0
    monkeypatch.setenv(variable, "")
    assert getattr(load_settings(), field) == getattr(Settings(), field)
    for nonsense in ("abc", "-2"):
        with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}-timeout"):
            load_settings({field: nonsense})
        monkeypatch.setenv(variable, nonsense)
        with pytest.raises(SettingsError, match=variable):
            load_settings()


@pytest.mark.parametrize("field", ["queue_timeout", "stall_timeout", "detach_limit"])
def test_c139_waits_without_a_limit(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """Give 0 and -1 as flag, as variable, and on to a child process: none of them is ever over."""
    for none in ("0", "-1"):
        given = load_settings({field: none})
        assert getattr(given, field) >= 30 * 365 * 86_400
        variable = f"LLAMASTEAD_{field.upper()}"
        monkeypatch.setenv(variable, none)
        assert load_settings() == given
        monkeypatch.setenv(variable, given.child_env()[variable])
        assert load_settings() == given
        monkeypatch.delenv(variable)
    with pytest.raises(SettingsError, match=f"--{field.replace('_', '-')}"):
        load_settings({field: "-2"})


def test_redis_is_embedded_in_the_run_folder_unless_given() -> None:
    """Give a run folder, with and without a Redis."""
    settings = load_settings({"run_dir": "/tmp/herd"})
    assert (settings.redis_url, settings.embedded_redis) == ("unix:///tmp/herd/redis/valkey.sock", True)
    assert not load_settings({"redis_url": "redis://r"}).embedded_redis


def test_run_folder_follows_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a setting it lies in the session's runtime folder, else in the home folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert load_settings().run_dir == tmp_path / "llamastead"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", "/home/u")
    assert load_settings().run_dir == Path("/home/u/.local/state/llamastead")


def test_a_run_folder_too_long_for_sockets() -> None:
    """Take the longest folder whose sockets fit and one letter more; the message says how long it may be."""
    host = "a-host"
    room = 107 - len(f"/i/{host}-999999-999999/e.sock")
    load_settings({"run_dir": "/" + "x" * (room - 1), "host_id": host}).check_socket_paths()
    with pytest.raises(SettingsError, match=f"107 bytes, so it may have {room}.*shorter --run-dir"):
        load_settings({"run_dir": "/" + "x" * room, "host_id": host}).check_socket_paths()


def test_refusals_name_where_the_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nonsense by each way: the message names the flag or the variable, and the value."""
    assert refused(port="x").startswith("--port: input should be a valid integer")
    assert refused(models_max="-1") == "--models-max: input should be greater than or equal to 0, not '-1'"
    monkeypatch.setenv("LLAMA_ARG_MODELS_MAX", "many")
    assert refused().startswith("LLAMA_ARG_MODELS_MAX: ")
    monkeypatch.setenv("LLAMASTEAD_MODELS_MAX", "lots")
    assert refused().startswith("LLAMASTEAD_MODELS_MAX: ")
    assert refused().endswith("not 'lots'")


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("engine", "~nobody-of-this-name/llama-server", "--engine"),
        ("run_dir", "~nobody-of-this-name/run", "no such user"),
        ("ui_config", "[" * 50_000, "--ui-config"),
    ],
)
def test_what_cannot_be_a_path_or_an_object_is_refused(name: str, value: str, flag: str) -> None:
    """Give the home of nobody and an object nested beyond any parser: refused in words."""
    with pytest.raises(SettingsError, match=flag):
        load_settings({name: value})


@pytest.mark.parametrize("value", ["0", "-1"])
def test_never_unload(value: str) -> None:
    """Both spellings of never."""
    assert load_settings({"unload_after": value}).unload_after is None


def test_secrets_do_not_show() -> None:
    """Print the settings: no key and no password of Redis."""
    settings = load_settings({"api_keys": "k1", "admin_keys": "k2", "redis_url": "redis://:k3@r"})
    assert not any(secret in repr(settings) for secret in ("k1", "k2", "k3"))
    assert settings.api_keys == (SecretStr("k1"),)


def test_keys_of_clients_come_from_flag_and_file(tmp_path: Path) -> None:
    """Put keys, comments and blanks in a file; a missing file is told by name."""
    file = tmp_path / "keys"
    file.write_text("# ours\n\n k2 \nk3\n")
    assert load_settings({"api_keys": "k1", "api_key_file": file}).inference_keys() == {"k1", "k2", "k3"}
    with pytest.raises(SettingsError, match="--api-key-file /nowhere can't be read"):
        load_settings({"api_key_file": "/nowhere"}).inference_keys()


def test_every_setting_has_help() -> None:
    """A line of help for each field, without a closing full stop."""
    for name, info in Settings.model_fields.items():
        assert info.description, name
        assert not info.description.endswith("."), name
