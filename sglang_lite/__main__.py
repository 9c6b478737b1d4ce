"""Entry point of `python -m sglang_lite`: the command line."""

import sys

from sglang_lite.cli import main

sys.exit(main())
