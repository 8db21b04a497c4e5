"""The command's beginning, for the script `llamastead` and for `python -m llamastead`, as roles begin."""

import sys


def start() -> int:
    """Run the command; a Ctrl-C while its code is still being read is no traceback either."""
    try:
        from llamastead.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(start())
