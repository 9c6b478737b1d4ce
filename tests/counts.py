"""Counts of what tests repeat."""

import os


def some(few: int, all_of_them: int) -> int:
    """How often a test repeats what is many of a kind: few times, or as often as
    `SGLANG_LITE_CASES=all` says.
    """
    return all_of_them if os.environ.get("SGLANG_LITE_CASES") == "all" else few
