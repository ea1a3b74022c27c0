"""`python -m isp` and `torchrun -m isp`: the same program as the command `isp`."""

import os
import sys
from contextlib import suppress

from isp.cli import main

if __name__ == "__main__":
    code = main()
    if code and "RANK" in os.environ:
        # Transfers of a rank that failed are still under way, and a thread of gloo that tells
        # Python so while the interpreter ends aborts it: the failure would be that signal.
        with suppress(OSError):  # of a pipe whose reader has gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
