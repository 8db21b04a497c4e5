"""A supervisor as it was when the holder protocol had version 1, for the tests of an upgrade.

`version_one.py FOLDER PYTHON -m llamastead WORDS…` runs `llamastead WORDS…` with that protocol. Its holders
are of version 1, too: made in FOLDER from today's by taking out what version 2 added.
"""

import shutil
import sys
from pathlib import Path

from llamastead.cli.main import main
from llamastead.supervisor import holder_link, holders
from llamastead.supervisor.launch import InstanceSpec

# File → what version 2 added there, and what stood in its place.
ADDED = {
    "clients.py": [("VERSION = 2", "VERSION = 1")],
    "holding.py": [
        ("""self.spec.get("address", f"unix:{self.spec['socket']}")""", """f"unix:{self.spec['socket']}\""""),
        ("""spec.get("address", f"unix:{spec['socket']}")""", """f"unix:{spec['socket']}\""""),
    ],
}


def holder_of_version_one(folder: Path) -> Path:
    """Make the holder program of version 1 and return its folder."""
    program = folder / "holder-1"
    shutil.copytree(holders.PROGRAM, program, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in ADDED.items():
        text = (program / name).read_text()
        for now, then in changes:
            assert text.count(now) == 1, f"{name} has no longer what version 2 added: {now}"
            text = text.replace(now, then)
        (program / name).write_text(text)
    return program


def speak_version_one(program: Path) -> None:
    """Have this process start and talk to its holders as version 1 did."""
    today = InstanceSpec.message

    def message(spec: InstanceSpec) -> dict[str, object]:
        return {name: value for name, value in today(spec).items() if name != "address"}

    InstanceSpec.message = message  # type: ignore[method-assign]
    holders.PROGRAM = program
    holder_link.VERSION = 1


if __name__ == "__main__":
    speak_version_one(holder_of_version_one(Path(sys.argv[1])))
    sys.exit(main(sys.argv[5:]))
