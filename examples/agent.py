"""An agent with tools and a memory: what it is told it notes, and later questions see the notes
that they name. Run: python examples/agent.py
"""

import sglang_lite as sgl

notes: dict[str, str] = {}


def remember(key: str, value: str) -> str:
    """Writes a note."""
    notes[key] = value
    return "noted"


def weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "snow", "Rome": "sun"}.get(city, "unknown")


def time(city: str) -> str:
    """The time in a city."""
    return {"Oslo": "9:00", "Rome": "10:00"}.get(city, "unknown")


call = sgl.gen(
    "call", tools=[remember, weather, time], tool_choice="required", max_tokens=40, temperature=0
)
EXAMPLES = """What is the weather in Lima?
{"tool": "weather", "arguments": {"city": "Lima"}}
My sister lives in Cairo.
{"tool": "remember", "arguments": {"key": "sister", "value": "Cairo"}}
What time is it in Quito?
{"tool": "time", "arguments": {"city": "Quito"}}
My aunt works in Paris.
{"tool": "remember", "arguments": {"key": "aunt", "value": "Paris"}}
What is the weather at my aunt's? (aunt: Paris)
{"tool": "weather", "arguments": {"city": "Paris"}}
"""


@sgl.function
def turn(s: sgl.ProgramState, message: str) -> str:
    known = "".join(f" ({key}: {value})" for key, value in notes.items() if key in message)
    s += f"{EXAMPLES}{message}{known}\n" + call
    return str(s["call"].run())


def main() -> None:
    for message in (
        "My brother lives in Oslo.",
        "My friend works in Rome.",
        "What is the weather in Rome?",
        "What is the weather at my brother's?",
        "What time is it at my friend's?",
    ):
        state = turn(message).run()
        print(f"{message}\n    {state['call'].name}{state['call'].arguments} -> {state.ret_value}")


if __name__ == "__main__":
    main()
