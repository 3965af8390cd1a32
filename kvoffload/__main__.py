"""``python -m kvoffload``."""

import sys

from kvoffload.cli import run

sys.exit(run())
