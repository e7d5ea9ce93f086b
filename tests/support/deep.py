"""How deep `make test-deep` looks: at every case of each product, and at `TIMES` as many drawn examples."""

import os

DEEP = "SUPERADAM_DEEP" in os.environ
TIMES = int(os.environ["SUPERADAM_DEEP"]) if DEEP else 1  # by which the limits on a test's time grow, too
assert TIMES > 0
