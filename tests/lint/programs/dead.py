"""A line for a choice that there is not."""

import sglang_lite as sgl


@sgl.function
def route(s, message):
    s += f"Message: {message}\nTeam: " + sgl.select("team", ["sales", "support"])
    if s["team"] == "slaes":
        s += "\nOffer:"  # fault: unreachable
    s += sgl.gen("reply", max_tokens=64)
