"""Records and errors as data, msgpack or JSON, and back.

A message is one object, `{"version": 1, "type": …, "data": …}`. The types are a closed table: the records of `protocol`
and `program`, and "Error". Nothing that comes from outside names a class or is called. Data is scanned before anything
is made of it: its size, depth and count of items, names that come twice, texts that are no UTF-8, integers of more than
64 bits. (JSON that is byte for byte what this writes has none of these, and is held against that instead: 20 times as
fast.) Whatever is wrong with it is a WireError.

What is written in a way of its own:

- Members that have their default are left out. So a default is part of the format: changing one makes a new version.
- Numbers that JSON does not have are `{"$float": "inf"}`, "-inf" or "nan" there. `$float` is no name in `meta`.
- Bytes are base64 in JSON.
- An error is its class in the table (or the next base that is there), its texts, and what its class adds. Its place in
  a program is file, line and function. A cause is told in a note. Halves of surrogate pairs in its texts are escaped.
  Of the results of a BatchError only errors travel, None stands for the others. The value of a ValueValidationError is
  its `repr` where it is no plain data.

What has no form is refused where it is sent: callables and other objects, integers of more than 64 bits, halves of
surrogate pairs, and in `meta` all but None, booleans, numbers, texts, lists and dictionaries by text.
"""

from sglang_lite.wire.limits import LIMITS, Limits
from sglang_lite.wire.messages import TYPES, VERSION, Form, Message, decode, encode

__all__ = ["LIMITS", "TYPES", "VERSION", "Form", "Limits", "Message", "decode", "encode"]
