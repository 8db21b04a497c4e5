"""How many clients one process can serve: each takes two open files, its own and its instance's."""

import logging
import resource

log = logging.getLogger(__name__)

FILES_WANTED = 65_536
FILES_OF_OUR_OWN = 64
FEW_CLIENTS = 1_500


def most_clients() -> int:
    """Raise this process's limit of open files as far as it may go; return how many clients that is good for.

    Few are warned of: beyond that number clients get a 503.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(hard, FILES_WANTED))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    clients = max(1, (files - FILES_OF_OUR_OWN) // 2)
    if clients < FEW_CLIENTS:
        log.warning(
            "few open files are allowed; raise `ulimit -n`", extra={"files": files, "clients": clients}
        )
    return clients
