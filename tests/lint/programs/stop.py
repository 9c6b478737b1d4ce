"""A stop that its constraint never lets the model write."""

import sglang_lite as sgl


@sgl.function
def year(s, event):
    s += f"{event} was in the year "
    s += sgl.gen("year", regex="[0-9]{4}", stop="\n")  # fault: stop-never-comes
