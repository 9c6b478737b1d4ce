"""Logit processors that an engine's process finds by name."""

import threading


def only_e(ids, logits):
    logits[:] = -100.0
    logits[36] = 0.0  # "E"
    return logits


class Class:
    @staticmethod
    def only_f(ids, logits):
        logits[:] = -100.0
        logits[37] = 0.0
        return logits


def bad(ids, logits):
    raise LookupError("mine")


def loud(ids, logits):
    """Writes more than a pipe holds."""
    print("x" * 1_000_000, flush=True)
    return logits


def hanging(ids, logits):
    threading.Event().wait()


class Instance:
    def __call__(self, ids, logits):
        return logits


instance = Instance()
not_callable = 7
