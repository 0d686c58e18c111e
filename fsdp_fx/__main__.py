"""``python -m fsdp_fx``: the ``fsdp-fx`` command."""

import sys

from .cli import main

if __name__ == "__main__":  # also imported by the demo's processes
    sys.exit(main())
