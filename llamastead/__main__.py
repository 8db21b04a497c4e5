"""`python -m llamastead`: the command, as `llamastead up` starts its roles with."""

import sys

from llamastead.cli.main import main

sys.exit(main())
