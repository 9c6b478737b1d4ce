"""Texts that a verification gives to a model and its tokenizer. They are the same for every model,
so that reports can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Prompts of the greedy comparison. The first ten become user turns if the model has a chat
# template.
PROMPTS: Final = (
    "What is the capital of France?",
    "List three colours.",
    "Translate 'good morning' into Spanish.",
    "Write a function that adds two numbers.",
    "How many legs has a spider?",
    "Erkläre in einem Satz, was ein Schaltjahr ist.",
    "Résume en une phrase : le chat dort sur le canapé.",
    "用一句话介绍北京。",
    "Name a city, its country and its river.",
    "Say hello to 3 people: Ann, Bob and Zoë.",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "import json\n\nwith open('data.json') as file:\n    data =",
    "1, 2, 3, 4, 5, 6,",
    "2024-01-31, 2024-02-29, 2024-03-31,",
    "Q: What is 12 + 30?\nA:",
    '{"name": "Maria", "age": 34, "city":',
    "| name | age |\n|---|---|\n| Ann | 30 |\n| Bob |",
    "<html>\n  <body>\n    <p>",
    "SELECT name, age FROM people WHERE",
    "To be, or not to be, that is",
    "Der schnelle braune Fuchs springt über den",
    "El perro corre por el",
    "Кошка сидит на",
    "今日は天気が",
    "The following is a list of fruits:\n- apple\n- banana\n-",
    "Great film, I loved it => positive\nBoring and long => negative\nA joy to watch =>",
    "a  b   c    d\n\n\te\t\tf\r\n",
    "🙂 means happy, 😢 means",
)

# Texts that tokenizers get wrong in different places.
TOKENIZED: Final = (
    "", " ", "  ", "\n", "\n\n \n", "\t", "\r\n", "a", " a", "a ", "  a  b  ",
    "Hello, world!", "I'm sure they're here; it's John's.", "ALLCAPS camelCase snake_case kebab-case",
    "0", "7", "42", "123", "1234567890", "3.14159", "1,234,567.89", "2024-01-31T12:30:45Z", "a1b22c333", "v1.2.3-rc4",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; i++) {\n\ta[i] *= 2;\n}\n", "x==y&&!z||w",
    '{"a": [1, 2, {"b": null}], "c": "d\\n"}', "<a href='x'>y</a>", "https://example.org/a?b=c&d=%20#e",
    "é", "e\u0301", "ﬁ", "Ａ", "ß", "İstanbul", "naïve café", "Größe", "Ελληνικά", "Русский текст", "العربية", "עברית",
    "हिन्दी", "ไทย", "中文字符", "日本語のテキスト", "한국어", "中文 and English 混合", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "\u200b", "\u00a0x\u00a0", "\ufeffx",
    "🙂", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "a🙂b", "…—“quoted”", "\x00", "\x07", "\u2028",
    "word " * 200, "ab" * 300, "x" * 600, "The cat\nis here. " * 60,
)  # fmt: skip

_TOOLS: Final = (
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name <of> the city"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
    {
        "name": "get_time",
        "description": "The time & date.",
        "parameters": {"type": "object", "properties": {}},
    },
)
_CALL: Final = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
}
_USER: Final = {"role": "user", "content": "What's the weather in Zürich?"}

# Conversations by name: messages, and the tools shown with them.
CONVERSATIONS: Final[
    Mapping[str, tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]]
] = {
    "one turn": ([{"role": "user", "content": "Hello!"}], ()),
    "system": (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
        (),
    ),
    "several turns": (
        [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "And 2 + 2?\n\nIn words, please."},
        ],
        (),
    ),
    "system and several turns": (
        [
            {"role": "system", "content": "You are a pirate. <b>&amp;</b>"},
            {"role": "user", "content": "Grüß dich 🙂"},
            {"role": "assistant", "content": "Arr!"},
            {"role": "user", "content": "Where to?"},
            {"role": "assistant", "content": "West."},
            {"role": "user", "content": "Why?"},
        ],
        (),
    ),
    "tools": ([_USER], _TOOLS),
    "system and tools": ([{"role": "system", "content": "Use tools."}, _USER], _TOOLS),
    "a tool's result": (
        [
            _USER,
            {"role": "assistant", "content": "I will look.", "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "abcdefghi",
                "name": "get_weather",
                "content": '{"sky": "clear"}',
            },
        ],
        _TOOLS,
    ),
    "after a tool's result": (
        [
            _USER,
            {"role": "assistant", "content": "I will look.", "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "abcdefghi",
                "name": "get_weather",
                "content": '{"sky": "clear"}',
            },
            {"role": "assistant", "content": "Clear."},
            {"role": "user", "content": "Thanks. And the time?"},
        ],
        _TOOLS,
    ),
}


def random_prose(sentences: int, seed: int = 0) -> str:
    """Generates a text of `sentences` sentences, a different one for each seed."""
    draw = random.Random(seed)
    who = (
        "The baker",
        "A sailor",
        "My aunt",
        "The clerk",
        "An old teacher",
        "Somebody",
        "The engineer",
        "Our neighbour",
    )
    what = ("bought", "lost", "found", "painted", "described", "sold", "repaired", "counted")
    things = (
        "lamps",
        "boats",
        "letters",
        "apples",
        "keys",
        "maps",
        "chairs",
        "clocks",
        "stones",
        "books",
    )
    places = (
        "in Oslo",
        "near the harbour",
        "at the station",
        "under the bridge",
        "in Lima",
        "behind the school",
    )
    return " ".join(
        f"{draw.choice(who)} {draw.choice(what)} {draw.randrange(2, 1000)} {draw.choice(things)} {draw.choice(places)}."
        for _ in range(sentences)
    )
