"""A support agent: it looks up orders by itself, but a refund waits until somebody approves it, and a
journal keeps the run until then. Run: python examples/support_agent.py [MODEL]"""

import sys
import tempfile
from pathlib import Path

import sglang_lite as sgl

ORDERS: dict[str, dict[str, object]] = {
    "A17": {"item": "kettle", "price": 40, "status": "lost by the carrier"},
    "B52": {"item": "lamp", "price": 25, "status": "on its way"},
}
MESSAGE = "What is the status of my order A17? Refund its price if it is lost."
refunds: dict[str, float] = {}


@sgl.idempotent
def look_up_order(order: str) -> dict[str, object]:
    """Item, price in dollars and status of an order."""
    return ORDERS[order]


def refund(order: str, amount: float) -> str:
    """Pays back an amount in dollars for an order."""
    refunds[order] = amount
    return f"{amount:g} dollars were paid back"


def allow(order: str, amount: float) -> bool:
    """Stands for a person who reads the call."""
    return order not in refunds and amount <= 50


@sgl.function
def support(s: sgl.ProgramState, message: str) -> str:
    s += sgl.system(
        "You are the support agent of a shop. Look up the order before you decide. Refund the price "
        "of orders that are lost. At last, tell the customer in one sentence what was done."
    )
    s += sgl.user(message)
    tools = (look_up_order, refund)
    return str(sgl.use_tools(s, tools, approve={refund: "ask"}, max_tokens=80, temperature=0))


def main() -> None:
    backend = sgl.Engine(sys.argv[1]) if sys.argv[1:] else None
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "A17.jsonl")
        state = support.run(MESSAGE, journal=journal, backend=backend)
        print("waiting:", *state.pending(), "refunds:", refunds)
        # Tomorrow, in another process: the journal has the run so far, so the model is not asked again.
        state = support.run(MESSAGE, journal=journal, backend=backend)
        while calls := state.pending():
            state = state.resume([c.approve() if allow(**c.arguments) else c.deny() for c in calls])
    print("refunds:", refunds, "answer:", state.ret_value)


if __name__ == "__main__":
    main()
