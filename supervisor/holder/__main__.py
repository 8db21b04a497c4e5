"""The holder: a small process between the supervisors and one `llama-server`.

Run as `python -I -S -X utf8 <this folder> <instance folder>` with a listening unix socket as standard
input: the supervisor binds `h.sock`, so that it can connect at once. Only modules of the standard library
that import in milliseconds; this file is not cached as byte code, so it stays a stub.
"""

import sys

from holding import hold

sys.exit(hold(sys.argv[1]))
