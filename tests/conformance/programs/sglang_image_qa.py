"""SGLang's image_qa."""

import sglang_lite as sgl
from tests.conformance.case import Case

PNG = b"\x89PNG\r\n\x1a\n"


@sgl.function
def image_qa(s, question):
    s += sgl.user(sgl.image(PNG) + question)
    s += sgl.assistant(sgl.gen("answer"))


CASE = Case(
    image_qa,
    {"Describe.": "A cat."},
    text="<|im_start|>user\n<image>Describe.<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n",
    variables={"answer": "A cat."},
    arguments={"question": "Describe."},
    blocking=False,
    engine=False,
    programs=0,
)
