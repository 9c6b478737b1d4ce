"""The registry is the one list of grammar engines: the config takes its names, and each has an
engine of that name.
"""

from typing import get_args

import pytest

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.structured_output.registry import ConstraintBackend, make_engine
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

VOCABULARY = Vocabulary((*(bytes([i]) for i in range(256)), b""), (256,))


@pytest.mark.parametrize("name", get_args(ConstraintBackend))
def test_a_name_of_the_registry_is_a_setting_with_an_engine(name):
    assert EngineConfig(constraint_backend=name).constraint_backend == name
    if name != "auto":
        assert make_engine(name, VOCABULARY).name == name


def test_other_names_are_refused():
    with pytest.raises(
        ParameterError, match=f"is not one of {', '.join(get_args(ConstraintBackend))}"
    ):
        EngineConfig(constraint_backend="grammars")  # type: ignore[arg-type]  # wrong on purpose
