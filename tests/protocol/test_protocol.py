"""The error family says what, where and what to do."""

import copy
import gc
import pickle
import weakref

import pytest

import sglang_lite as sgl
from sglang_lite import protocol

LINE_7 = protocol.Location("prog.py", 7, "<module>")


def test_every_error_of_the_package_is_of_one_family():
    errors = [
        v for v in vars(protocol).values() if isinstance(v, type) and issubclass(v, Exception)
    ]
    assert len(errors) > 10
    assert all(issubclass(e, sgl.SglError) for e in errors)


def test_message_hint_and_place_are_joined():
    error = sgl.SglError("went wrong", hint="Do this.", where=LINE_7)
    assert str(error) == "went wrong. Do this. [prog.py:7 in <module>]"
    assert str(sgl.SglError("ends.", hint="Do this.")) == "ends. Do this."


def test_standard_classes_still_catch():
    with pytest.raises(ValueError, match="top_p: bad"):
        raise sgl.ParameterError("top_p", "bad")
    with pytest.raises(KeyError):
        raise sgl.UnknownVariableError("no variable 'x'")
    assert str(sgl.UnknownVariableError("no variable 'x'")) == "no variable 'x'"
    with pytest.raises(TimeoutError):
        raise sgl.RequestTimeoutError("late")
    assert sgl.RequestTimeoutError.retryable
    assert not sgl.ParameterError.retryable


def test_a_constraint_error_names_the_pointer():
    assert (
        str(sgl.ConstraintError("no such type", pointer="/properties/a"))
        == "no such type (at /properties/a)"
    )


def test_unset_shows_itself():
    assert repr(protocol.UNSET) == "UNSET"


@pytest.mark.parametrize(
    "error",
    [
        sgl.ParameterError("a", "bad", hint="h"),
        sgl.ConstraintError("m", pointer="/x"),
        sgl.ValueValidationError("m", text="t", value=[1]),
        sgl.BatchError("m", [1, 2]),
        sgl.UnknownVariableError("m"),
    ],
)
def test_errors_can_be_copied_and_pickled(error):
    error.where = LINE_7
    clone = copy.copy(error)
    assert (type(clone), str(clone), vars(clone)) == (type(error), str(error), vars(error))
    far = pickle.loads(pickle.dumps(error))
    assert type(far) is type(error)
    assert "prog.py:7" in str(far)


RECORDS = [
    protocol.SamplingParams(stop=("a",), seed=3),
    protocol.JsonSchema("{}", separators=[",", ":"]),  # type: ignore[arg-type]  # wrong on purpose
    protocol.Tag(
        "<a>",
        protocol.OneOf([protocol.Number("float"), protocol.Repeated(protocol.Choices(["x"]))]),  # type: ignore[arg-type]  # wrong on purpose
        "</a>",
    ),
    protocol.Prompt((protocol.Span("a", (1, 2)),), images=(protocol.Media(b"\x00"),)),
    protocol.Generation("x", spans=(protocol.Span("x"),), matched=3, meta={"a": [1]}),
    protocol.ProgramResult("x"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_can_be_copied_pickled_and_compared_and_not_changed(record):
    for clone in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert clone == record
        # `meta` is a dictionary
        assert isinstance(record, protocol.Generation) or hash(clone) == hash(record)
    with pytest.raises(AttributeError):
        setattr(record, record.__struct_fields__[0], None)
    assert pickle.loads(pickle.dumps(protocol.UNSET)) is protocol.UNSET


def test_an_error_that_leads_back_to_its_event_is_collected():
    error = sgl.BackendError("no answer")
    error.event = protocol.Played((0,), None, error)
    seen = weakref.ref(error)
    del error
    gc.collect()
    assert seen() is None
