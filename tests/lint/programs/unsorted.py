"""The order of a set stands in the prefix: another one in every process."""

import sglang_lite as sgl

LABELS = {
    "billing",
    "delivery",
    "returns",
    "account",
    "warranty",
    "praise",
    "complaint",
    "question",
}


@sgl.function
def label(s, ticket):
    s += "Labels: " + ", ".join(LABELS) + "\n"  # fault: changing-text
    s += f"Ticket: {ticket}\nLabel:" + sgl.select("label", sorted(LABELS))
