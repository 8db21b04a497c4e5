"""`llamastead up` whose roles are `fake_role.py`; everything else of it is real."""

import sys
from pathlib import Path

from llamastead.cli.main import main
from llamastead.up import main as up

up.ROLE_COMMAND = (sys.executable, str(Path(__file__).with_name("fake_role.py")))
sys.exit(main(["up", *sys.argv[1:]]))
