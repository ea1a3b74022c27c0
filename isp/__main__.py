"""`python -m isp` and `torchrun -m isp`: the same program as the command `isp`."""

import sys

from isp.cli import main

if __name__ == "__main__":
    sys.exit(main())
