"""The reader of free text against its definition in plain Python."""

import random

from sglang_lite.constraints.reader import TextReader, TextTree
from tests.counts import some
from tests.free_reading import longest_text


def read(texts, free):
    """What the reader reads from free text, byte by byte."""
    reader = TextReader(TextTree(texts))
    position, data = reader.start, free.encode()
    count = 0
    while count < len(data) and (after := reader.step(position, data[count])) is not None:
        position = after
        count += 1
    since = reader.count_bytes_since_text(position, data[count] if count < len(data) else None)
    return None if since is None else data[: count - since].decode()


def test_the_longest_text_is_read():
    dice = random.Random(0)
    for _ in range(some(3000, 30_000)):
        letters = dice.choice(["ab", "a 1", "aé,", "aя日", "nothig "])
        texts = [
            "".join(dice.choices(letters, k=dice.randint(0, 4))) for _ in range(dice.randint(1, 6))
        ]
        free = "".join(dice.choices(letters, k=dice.randint(0, 8)))
        assert read(texts, free) == longest_text(texts, free), (texts, free)


def test_whole_words_are_read():
    assert read(["no", "maybe"], "nothing") is None
    assert read(["no", "maybe"], "no, thing") == "no"
    assert read(["4", "400"], "40 apples") is None
    assert read(["caf", "café"], "cafés") is None
    assert read(["日"], "日本") == "日"  # words of other scripts have no blanks between them
    assert read(['"a"', "{"], '"a"bc') == '"a"'
