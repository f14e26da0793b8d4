"""``python -m nereus_core.cli``: the same as ``nereus``."""

from nereus_core.cli import main

main()
