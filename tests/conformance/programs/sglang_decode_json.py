"""SGLang's decode_json: values between literals."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def decode_json(s):
    s += "Write JSON.\n"
    with s.var_scope("json_output"):
        s += "{\n"
        s += '  "name": ' + sgl.gen_string("name") + ",\n"
        s += '  "age": ' + sgl.gen_int("age") + "\n"
        s += "}"


CASE = Case(
    decode_json,
    {'"name": ': '"Rom"', '"age": ': "7"},
    text='Write JSON.\n{\n  "name": "Rom",\n  "age": 7\n}',
    variables={"json_output": '{\n  "name": "Rom",\n  "age": 7\n}', "name": '"Rom"', "age": "7"},
    programs=1,
)
