"""Copies of pages to blocks and back, as a kernel or its twin makes them."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def blocks_copied(copy):
    planes = [torch.randn(heads, 24, 6, device=DEVICE) for heads in (2, 1, 2)]
    memory = torch.zeros(7 * 5 * 4 * 6 * 4, dtype=torch.uint8, device=DEVICE)
    of_pages = copy(planes, memory, 4)
    for pages, slots, to_host in (([5, 0, 2], [1, 2, 6], True), ([3, 4], [6, 1], False)):
        of_pages(
            *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (pages, slots)),
            to_host=to_host,
        )
    return *planes, memory
