"""Entry point of `python -m sglang_lite.launch_server`: `sglang-lite serve` under SGLang's name."""

import sys

from sglang_lite.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
