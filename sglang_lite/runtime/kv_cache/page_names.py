"""Names of pages: hashes of everything a page's bytes depend on. They identify copies of pages
outside the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Node

NAME_BYTES = 16


def name_state_file(page: bytes) -> bytes:
    """Returns the name of the file that has the state at the end of the page named `page`."""
    return blake2b(page, digest_size=NAME_BYTES, person=b"state").digest()


class PageNames:
    """Computes the names of one engine's pages.

    A page's name is a hash of the previous page's name and of the page's tokens, so equal names
    mean equal prefixes.

    Args:
        header: everything else the bytes depend on: weights, layout, data type, page size.
        page_size: tokens in a page.
        states: description of the states that belong to pages, which is also part of the header;
            empty for models without states.

    Attributes:
        key: hash of the header, on which every name depends.
        page_size, states: the arguments.
    """

    def __init__(self, header: bytes, page_size: int, states: str = "") -> None:
        self.key = blake2b(header, digest_size=32).digest()
        self.page_size = page_size
        self.states = states

    def names_of_node(self, node: Node) -> list[bytes]:
        """Returns the names of a node's pages. They are computed once and kept in the node."""
        unnamed: list[Node] = []
        current = node
        while current.names is None:
            assert current.parent is not None  # the loop ends at a root, where `names` is set
            unnamed.append(current)
            current = current.parent
        last = self.last_name(current) if unnamed else b""
        for each in reversed(unnamed):
            each.names = list(self.names_after(last, each.tokens))
            last = each.names[-1]
        assert node.names is not None
        return node.names

    def names_of_prefix(self, node: Node) -> list[bytes]:
        """Returns the names of all pages from the root to a node's end."""
        path: list[list[bytes]] = []
        while node.parent is not None:
            path.append(self.names_of_node(node))
            node = node.parent
        return [name for names in reversed(path) for name in names]

    def last_name(self, node: Node) -> bytes:
        """Returns the name of a node's last page. For a root, returns the initial name of its
        namespace, from which the names of the namespace's pages are derived.
        """
        last = self.names_of_node(node)[-1]
        return last if node.parent is not None else self.root_name(last)

    def root_name(self, namespace: bytes) -> bytes:
        """Returns the name from which the names of a namespace's pages are derived."""
        return blake2b(
            namespace, key=self.key, digest_size=NAME_BYTES, person=b"namespace"
        ).digest()

    def names_after(self, name: bytes, tokens: Ints) -> Iterator[bytes]:
        """Yields the names of the pages that follow the page called `name` and hold the int32
        `tokens`. An incomplete last page gets no name.
        """
        size = self.page_size * tokens.itemsize
        key = self.key
        data = tokens.tobytes()
        for start in range(0, len(data) - size + 1, size):
            name = blake2b(
                name + data[start : start + size], key=key, digest_size=NAME_BYTES
            ).digest()
            yield name
