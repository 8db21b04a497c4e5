"""`make_secrets.py FOLDER HOST`: at the first start, make what the services share; later nothing changes.

The herd secret goes to the run folder. A password for the Redis at HOST goes to FOLDER, as the address that
the roles use and as a line of Redis's own configuration. The group, which Redis's container has too, may read
both.
"""

import os
import secrets
import sys
from pathlib import Path

from llamastead.shared.secret import read_or_make_herd_secret


def write(path: Path, text: str) -> None:
    """Put a file in place that is whole whenever it is there, for its user and group only."""
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o640)
    draft.write_text(text)
    draft.chmod(0o440)
    draft.rename(path)


def make(folder: Path, host: str) -> None:
    """Make the password, in both its forms."""
    password = secrets.token_hex(32)
    write(folder / "redis.conf", f"requirepass {password}\n")
    # With a user: redis-cli -u takes an empty name for a name. Last, since it says that all is there.
    write(folder / "redis-url", f"redis://default:{password}@{host}:6379/0\n")


if __name__ == "__main__":
    read_or_make_herd_secret(Path(os.environ["LLAMASTEAD_RUN_DIR"]) / "secret")
    if not Path(sys.argv[1], "redis-url").exists():
        make(Path(sys.argv[1]), sys.argv[2])
