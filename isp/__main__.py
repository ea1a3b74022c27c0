"""The command `isp`, `python -m isp` and `torchrun -m isp`: the same program.

[Note: Leaving] Threads of torch, such as gloo's, still run when a command is over. One that calls
into Python while the interpreter is torn down aborts the process: a run that is done would end with
SIGABRT, and be started again. So the command leaves without tearing anything down, once all that
writes is closed. `isp.parallelize` leaves that to the program that calls it.
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from isp.cli import main

__all__ = ["run"]


def run() -> NoReturn:
    """Run the command line of this process, and end the process."""
    try:
        code = main()
    except SystemExit as stop:  # argparse's
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if code == 0 or "RANK" not in os.environ:
        atexit._run_exitfuncs()
    # Else transfers of a rank that failed are still under way: what ends them could wait for ever.
    with suppress(OSError):  # of a pipe whose reader has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
