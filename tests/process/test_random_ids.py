"""Ids of answers are different ones, in a forked copy of the process, too."""

import re
import subprocess
import sys

from sglang_lite.process.random_ids import random_id

FORKED = """
import os
from sglang_lite.process.random_ids import random_id
child = os.fork()
os.write(1, (random_id() + "\\n").encode())  # by one call: the other one writes, too
if child:
    os.waitpid(child, 0)
"""


def test_ids_are_32_digits_and_different_ones():
    found = {random_id() for _ in range(1000)}
    assert len(found) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in found)


def test_a_forked_copy_has_others():
    told = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(told) == len(set(told)) == 2
