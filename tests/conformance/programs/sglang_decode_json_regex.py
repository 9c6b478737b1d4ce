"""SGLang's decode_json, of regexes."""

import sglang_lite as sgl
from sglang_lite.lang.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR
from tests.conformance.case import Case


@sgl.function
def decode_json(s):
    s += "JSON of Paris:\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen(regex=REGEX_STR + ",") + "\n"
        s += '  "population": ' + sgl.gen(regex=REGEX_INT + ",") + "\n"
        s += '  "latitude": ' + sgl.gen(regex=REGEX_FLOAT) + "\n"
        s += "}"


CASE = Case(
    decode_json,
    {'"name": ': '"Paris",', '"population": ': "2000,", '"latitude": ': "48.5"},
    text='JSON of Paris:\n{\n  "name": "Paris",\n  "population": 2000,\n  "latitude": 48.5\n}',
    variables={
        "json_output": '{\n  "name": "Paris",\n  "population": 2000,\n  "latitude": 48.5\n}'
    },
    programs=1,
)
