"""The program behind `isp`, `python -m isp` and `torchrun -m isp`.

It ends with `os._exit`, without tearing down the interpreter. See [Note: Leaving] in
docs/design/notes/train.md.
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
"""Time that all exit handlers of libraries have together. After that, the process ends anyway."""


def run() -> NoReturn:
    """Run the command line of this process, and end the process with its exit code."""
    _open_closed()
    try:
        code = main()
    except SystemExit as stop:  # raised by argparse; its code may be None or a text
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if code == 0 or not launched():
        late = threading.Timer(_EXIT_SECONDS, _leave_late, [code])
        late.daemon = True
        late.start()
        atexit._run_exitfuncs()  # `os._exit` below does not call them
        late.cancel()
    # Not for a launched rank that failed: its transfers are still in flight, and an exit handler
    # that ends them could wait forever for other ranks.
    with suppress(OSError):  # a closed pipe: nothing reads the output any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _open_closed() -> None:
    """Open the null device for each standard stream that the shell has closed (`>&-`).

    Otherwise the next file that is opened gets the descriptor of that stream, and so everything
    that ranks and libraries print. Python itself sets such a stream to None.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # This gets the lowest free descriptor, which may not be that of the stream.
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # for ranks that this process starts
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _leave_late(code: int) -> None:
    """End the process with `code` although an exit handler still runs; a timer calls this."""
    with suppress(OSError):
        sys.stderr.write(
            f"warning: an exit handler of a library still runs after {_EXIT_SECONDS:g} s, so this"
            f" process ends without it\n"
        )
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
