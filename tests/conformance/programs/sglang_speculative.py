"""SGLang's gen_character_spec: with its hint for remote APIs."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function(num_api_spec_tokens=64)
def gen_character(s):
    s += "Construct a character within the following format:\nName: Max.\n\nPlease begin:\n"
    s += "Name:" + sgl.gen("name", stop="\n") + "\nBirthday:" + sgl.gen("birthday", stop="\n")
    s += "\nJob:" + sgl.gen("job", stop="\n") + "\n"


CASE = Case(
    gen_character,
    {"begin:\nName:": " Ann\n", "Birthday:": " May\n", "Job:": " Cook\n"},
    text="Construct a character within the following format:\nName: Max.\n\nPlease begin:\n"
    "Name: Ann\nBirthday: May\nJob: Cook\n",
    variables={"name": " Ann", "birthday": " May", "job": " Cook"},
    programs=1,
)
