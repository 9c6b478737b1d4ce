"""Variables that threads set, fail and take away."""

import sys
import threading

import pytest

from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.protocol import ProgramError

TRIALS = 20_000  # without a lock around both steps one in this number went wrong


def test_a_variable_that_is_taken_away_fails_although_it_is_set_at_the_same_time():
    variables = [Variable() for _ in range(TRIALS)]
    together = threading.Barrier(2)
    error = ProgramError("taken away")
    switch_interval = sys.getswitchinterval()

    def set_all():
        for variable in variables:
            together.wait()
            variable.set(1)

    sys.setswitchinterval(1e-6)
    try:
        setter = threading.Thread(target=set_all)
        setter.start()
        for variable in variables:
            together.wait()
            variable.replace_with_error(error)
        setter.join()
    finally:
        sys.setswitchinterval(switch_interval)
    for variable in variables:
        with pytest.raises(ProgramError, match="taken away"):
            variable.wait()


def test_only_the_first_value_counts():
    variable = Variable()
    assert variable.set(1)
    assert not variable.set(2)
    assert variable.wait() == 1
