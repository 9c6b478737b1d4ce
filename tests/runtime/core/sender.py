"""A trainer that broadcasts a checkpoint's tensors, as SGLang's clients do: a process that tests
talk to by lines.
"""

import contextlib
import subprocess
import sys
from datetime import timedelta

from tests.children import ROOT

PATIENCE = timedelta(seconds=60)


class Sender:
    """The process, from outside."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "tests.runtime.core.sender", str(folder)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True)

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def group(self, name):
        """Has it make a group, and returns the port where an engine may join it."""
        self.tell("group", name)
        return int(self.process.stdout.readline())


@contextlib.contextmanager
def sender(folder):
    made = Sender(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def main(folder):
    import torch
    from safetensors.torch import load_file
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    # which the clients use
    make, world = (getattr(c10d, name) for name in ("_new_process_group_helper", "_world"))
    tensors, groups, stores = load_file(f"{folder}/model.safetensors"), {}, []
    for line in sys.stdin:
        what, name, *names = line.split()
        if what == "group":
            store = distributed.TCPStore(
                "127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=PATIENCE
            )
            stores.append(store)
            print(store.port, flush=True)
            inside = distributed.PrefixStore(name, store)
            groups[name], _ = make(2, 0, [], "gloo", inside, group_name=name, timeout=PATIENCE)
            world.pg_group_ranks[groups[name]] = {0: 0, 1: 1}
        elif what == "send":
            for each in names:
                distributed.broadcast(tensors[each], src=0, group=groups[name])
        else:
            flat = torch.cat([tensors[each].flatten().view(torch.uint8) for each in names])
            distributed.broadcast(flat, src=0, group=groups[name])


if __name__ == "__main__":
    main(sys.argv[1])
