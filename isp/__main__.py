"""The command `isp`, `python -m isp` and `torchrun -m isp`: the same program.

[Note: Leaving] Threads of torch, such as gloo's, still run when a command is over. One that calls
into Python while the interpreter is torn down aborts the process: a run that is done would end with
SIGABRT, and be started again. So the command leaves without tearing anything down, once all that
writes is closed. Handlers that libraries registered for the exit, such as those of trackers, get
`_EXIT_SECONDS`. `isp.parallelize` leaves that to the program that calls it.
"""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from isp.cli import main
from isp.utils.environment import launched

__all__ = ["run"]

_EXIT_SECONDS = 60.0
"""Time that exit handlers of libraries have, together, before the process leaves without them."""


def run() -> NoReturn:
    """Run the command line of this process, and end the process."""
    _open_closed()
    try:
        code = main()
    except SystemExit as stop:  # argparse's
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if code == 0 or not launched():
        late = threading.Timer(_EXIT_SECONDS, _leave_late, [code])
        late.daemon = True
        late.start()
        atexit._run_exitfuncs()
        late.cancel()
    # Else transfers of a rank that failed are still under way: what ends them could wait for ever.
    with suppress(OSError):  # of a pipe whose reader has gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _open_closed() -> None:
    """Open the null device for each standard stream that the shell has closed (`>&-`).

    Otherwise Python sets the stream to None, and the next file opened gets its descriptor, and so
    what ranks and libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which may be another's
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # for ranks
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _leave_late(code: int) -> None:
    """End the process although an exit handler still runs."""
    with suppress(OSError):
        sys.stderr.write(
            f"warning: an exit handler of a library still runs after {_EXIT_SECONDS:g} s, so this"
            f" process ends without it\n"
        )
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
