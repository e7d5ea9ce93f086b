"""`python -m superadam`: the command line."""

import sys

from superadam.cli import main

if __name__ == "__main__":
    sys.exit(main())
