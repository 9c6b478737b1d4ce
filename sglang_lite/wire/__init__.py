"""Serialisation of records and errors to JSON and back.

A message is one object, `{"version": 1, "type": …, "data": …}`. The types are a closed
table: the records of `protocol` and `program`, and "Error". Data from outside never names
a class to load or a function to call. Before anything is built from it, data is scanned
for its size, its depth, its number of items, duplicate names, texts that are not UTF-8,
and integers of more than 64 bits. (It is first decoded and encoded again. If the result
is equal, byte for byte, the data has none of these faults and needs no scan, which is 20
times as fast.) Every fault is a WireError.

Special representations:

- Members with their default value are omitted. A default is therefore part of the format:
  changing one makes a new version.
- Numbers that JSON lacks are `{"$float": "inf"}`, "-inf" or "nan". `$float` is not
  allowed as a name in `meta`.
- Bytes are base64.
- A message is one line for every reader: U+0085, U+2028 and U+2029 are escaped.
- An error is its class in the table (or the nearest base class in the table), its texts,
  and the members that its class adds. Its place in a program is file, line and function.
  Its cause becomes a note. Halves of surrogate pairs in its texts are escaped. Of a
  BatchError's results only errors are sent; other results become None. The value of a
  ValueValidationError becomes its `repr` if it is not plain data.

The sender rejects values without a representation: callables and other objects, integers
of more than 64 bits, halves of surrogate pairs, and in `meta` everything except None,
booleans, numbers, texts, lists and dictionaries with text keys.
"""

from sglang_lite.wire.limits import LIMITS, Limits
from sglang_lite.wire.messages import TYPES, VERSION, Message, decode, encode

__all__ = ["LIMITS", "TYPES", "VERSION", "Limits", "Message", "decode", "encode"]
