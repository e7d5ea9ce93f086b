"""How much more `make test-deep` tries: `TIMES` as many drawn examples, and every case of what is not drawn."""

import os

TIMES = int(os.environ.get("SUPERADAM_DEEP") or 1)
"""Of `make test`, how many times as much; so many times as long a test may take, too."""

DEEP = TIMES > 1
