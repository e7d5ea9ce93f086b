"""How much more `make test-deep` tries: `TIMES` as many drawn examples, and every case of what is not drawn."""

import os

TIMES = int(os.environ.get("SUPERADAM_DEEP") or 1)  # as much as `make test`, and as long may each test take
DEEP = TIMES > 1
