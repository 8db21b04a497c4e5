"""docs/scheduling.md says what the code does: words, knobs with their defaults, measured figures."""

import re
from pathlib import Path

import pytest

from bench.policy.__main__ import main
from llamastead.shared.settings import Settings
from llamastead.shared.settings_fields import ENV_PREFIX, field_extra
from llamastead.shared.words import EndClass, WaitReason
from llamastead.supervisor.core.reasons import RefuseReason
from llamastead.supervisor.registry.keys import OWN_KEYS, ROUTER_KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def in_words(default: float | None) -> str:
    """Return a default as the page writes it."""
    if default is None:
        return "never"
    return "on" if default is True else f"{default:g}"


def test_every_reason_and_end_has_its_row() -> None:
    """Compare the first words of the tables with the enumerations: none is missing, none is made up."""
    assert {row[0].strip("`") for row in rows_of("Why does it wait?")} == set(WaitReason)
    assert {row[1].strip("`") for row in rows_of("Refusals")} == {*RefuseReason, "queue_full"}
    assert {row[0].strip("`") for row in rows_of("How instances end, and what follows")} == set(EndClass)


def test_every_knob_exists_with_its_default() -> None:
    """Take each row of the knobs: the setting and preset key exist, variables and default are as written."""
    for flag, variables, key, default, _, _ in rows_of("Knobs"):
        if key:
            assert key.strip("`") in {*OWN_KEYS, *ROUTER_KEYS}, key
        if not variables:
            continue
        own, *routers = re.findall(r"`([A-Z_]+)`", variables)
        name = own.removeprefix(ENV_PREFIX).lower()
        info = Settings.model_fields[name]
        extra = field_extra(info)
        assert routers == ([extra["env"]] if extra["env"] else []), own
        shown = flag.strip("`").replace("[no-]", "")
        assert shown == ("" if extra["flag"] is None else f"--{name.replace('_', '-')}"), own
        assert default == in_words(info.default), own


def test_the_measured_table_is_what_the_simulator_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """Run `python -m bench.policy --markdown`: its output stands in the page as it is."""
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out in PAGE
