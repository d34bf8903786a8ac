"""`python -m functional_lowbit`: the command line."""

import sys

from functional_lowbit.cli._main import main

if __name__ == "__main__":
    sys.exit(main())
