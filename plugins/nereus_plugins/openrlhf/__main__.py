"""``python -m nereus_plugins.openrlhf``."""

from __future__ import annotations

import sys

from nereus_plugins.openrlhf.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
