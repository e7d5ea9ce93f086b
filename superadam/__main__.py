"""`python -m superadam`: the command line."""

import sys

from superadam.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
