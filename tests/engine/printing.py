"""A process that prints a long line and a last one."""

import os


def main(descriptor):
    os.write(1, b"x" * 1_000_000 + b"\nlast words\n")
    os._exit(7)
