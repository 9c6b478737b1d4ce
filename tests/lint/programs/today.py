"""The day stands in the prefix of all prompts."""

from datetime import date

import sglang_lite as sgl


@sgl.function
def plan(s, task):
    s += sgl.system(f"You are a planner. Today is {date.today()}.")  # fault: changing-text
    s += sgl.user(task)
    s += sgl.assistant(sgl.gen("plan", max_tokens=64))
