"""`python -m lineshaft` is the command `lineshaft`."""

import sys

from lineshaft.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
