"""A turn that is added to nothing."""

import sglang_lite as sgl


@sgl.function
def year(s, event):
    sgl.user(f"In which year was {event}?")  # fault: not-added
    s += sgl.assistant(sgl.gen("year", regex="[0-9]{4}"))
