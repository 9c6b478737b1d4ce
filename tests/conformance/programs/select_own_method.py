"""A method of the user's own."""

import sglang_lite as sgl
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from tests.conformance.case import Case


class Last(ChoicesSamplingMethod):
    """The choice that stands last."""

    def __call__(
        self,
        *,
        choices,
        normalized_prompt_logprobs,
        input_token_logprobs,
        output_token_logprobs,
        **more,
    ):
        return ChoicesDecision(choices[-1], {})


@sgl.function
def program(s):
    s += (
        "A "
        + sgl.select("a", ["x", "y", "z"], choices_method=Last())
        + "."
        + sgl.gen("b", max_tokens=3)
    )


CASE = Case(
    program,
    {"A ": "x", ".": "1"},
    text="A z.1",
    variables={"a": "z", "b": "1"},
    blocking=False,
    programs=1,
)
