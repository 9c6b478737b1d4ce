"""Instructions that all rows share stand behind text of which each has its own."""

import sglang_lite as sgl


@sgl.function
def review(s, text):
    with s.user():
        s += f"Review:\n{text}\n"
        # fault: move-up
        s += (
            "You grade reviews of restaurants. Give one to five points each for food, service, room and price. "
            "Grade what is written and nothing else; where a review says nothing of a thing, give three points. "
            "Do not explain the grades. Never give a grade for the reviewer's manners or spelling.\n"
        )
        s += "Grades:"
    s += sgl.assistant(sgl.gen("grades", max_tokens=16))
