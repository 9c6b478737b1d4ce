"""Remembers what a template's loops write, so that a growing conversation renders only its new
messages.

What an iteration writes depends on what its body reads (`loop_reads.py`): the item, the loop's
position, neighbours (`messages[loop.index0 - 1]`) and values that don't change during the loop. So
a loop's texts are kept in a tree with a node for each prefix of its list. A rendering follows the
known items, writes all their texts together, and executes the body only for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2.runtime import Undefined

from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.loop_reads import LoopReads
from sglang_lite.text.plain_bytes import UnchangedDict, write_plain

_MAX_TEXT = 16_384  # characters that an iteration wrote
_MAX_TEXTS = 4  # of one place in a list
_MAX_STEPS = 1_000_000  # of skipped iterations, before they are counted
_NODE_SIZE = 400  # bytes of a node, without its key and texts
_MAX_SIZE = 16_777_216  # of all nodes; then all are forgotten
_PURE_FUNCTIONS = ("dict", "raise_exception", "range")
_UNDEFINED = b"?"  # `write_plain` begins no value with this byte


@dataclass(frozen=True, slots=True)
class LoopText:
    """What iterations wrote.

    Attributes:
        steps, chars: work that they counted.
        iterations: how many there were.
    """

    text: str
    steps: int
    chars: int
    iterations: int = 1


class ListPrefix:
    """Node of the tree: a prefix of a list.

    Attributes:
        children: nodes of the prefixes with one more item, by the item's bytes.
        texts: what the iteration of the prefix's last item wrote, by what else it read.
    """

    __slots__ = ("children", "texts")

    def __init__(self) -> None:
        self.children: dict[bytes, ListPrefix] = {}
        self.texts: dict[bytes, LoopText] = {}


class LoopMemo:
    """Trees of what loops wrote.

    Args:
        functions: functions of all templates, by name.
    """

    def __init__(self, functions: Mapping[str, UserValue]) -> None:
        self._pure = {name: functions[name] for name in _PURE_FUNCTIONS if name in functions}
        self._trees: dict[bytes, ListPrefix] = {}
        self._size = 0

    def find_tree(
        self,
        loop: int,
        reads: LoopReads,
        items: Sequence[UserValue],
        lists: Sequence[UserValue],
        constants: Sequence[UserValue],
    ) -> tuple[ListPrefix | None, int]:
        """Finds the tree of a loop for the values that its body reads besides the items. Returns the
        tree, or None if these values can't be compared, and the work of finding it.

        Args:
            loop: number of the loop.
            items: the loop's list.
            lists, constants: the values of `reads.lists` and `reads.constants`.
        """
        functions = tuple(
            name
            for name, value in zip(reads.constants, constants)
            if name in self._pure and value is self._pure[name]
        )
        plain = [None if n in functions else value for n, value in zip(reads.constants, constants)]
        undefined = tuple(i for i, value in enumerate(plain) if isinstance(value, Undefined))
        for i in undefined:
            plain[i] = None
        length = len(items) if reads.length else 0
        same = tuple(each is items for each in lists)
        written = write_plain((loop, length, same, functions, undefined, tuple(plain)))
        if written.key is None:
            return None, written.work
        return self._find_or_add(self._trees, written.key), written.work

    def add_child(self, node: ListPrefix, item: bytes) -> ListPrefix:
        """Returns the node of the prefix with one more item. Adds it if it is missing."""
        return self._find_or_add(node.children, item)

    def _find_or_add(self, nodes: dict[bytes, ListPrefix], key: bytes) -> ListPrefix:
        node = nodes.get(key)
        if node is None:
            self._make_room(_NODE_SIZE + len(key))
            node = nodes.setdefault(key, ListPrefix())
        return node

    def add_text(self, node: ListPrefix, others: bytes, written: LoopText) -> None:
        """Remembers what an iteration wrote, unless it is too long.

        Args:
            node: the list's prefix up to the iteration's item.
            others: what else it read.
        """
        if len(written.text) > _MAX_TEXT:
            return
        if len(node.texts) >= _MAX_TEXTS:
            node.texts.clear()
        self._make_room(_NODE_SIZE + len(others) + 4 * len(written.text))
        node.texts[others] = written

    def _make_room(self, size: int) -> None:
        self._size += size
        if self._size > _MAX_SIZE:
            self._trees.clear()
            self._size = size


class LoopWalk:
    """Progress of one rendering through a loop's list.

    Args:
        memo: owner of the tree.
        tree: root of the loop's tree.
        reads: what the loop reads.
        items: the list.
        lists: the values of `reads.lists`.
        known_bytes: bytes of values by their id, for all loops of the rendering. Each is kept with
            its value, so that the id is not reused.
    """

    def __init__(
        self,
        memo: LoopMemo,
        tree: ListPrefix,
        reads: LoopReads,
        items: Sequence[UserValue],
        lists: Sequence[Sequence[UserValue]],
        known_bytes: dict[int, tuple[UserValue, bytes | None]],
    ) -> None:
        self._memo = memo
        self._reads = reads
        self._items = items
        self._lists = lists
        self._index = -1  # of the current iteration
        # from this index on, iterations read nothing besides the items up to their own
        self._reads_only_items_from = _find_first_self_contained(reads, items, lists)
        self._node: ListPrefix | None = tree  # the items so far; None once one can't be compared
        # what else the current iteration reads; None if this can't be compared
        self._others: bytes | None = None
        self._bytes = known_bytes
        self._work = 0  # not counted yet

    def skip_known(self, index: int) -> LoopText | None:
        """Returns the known text of the iterations from `index` on, up to a limit on their steps.
        Returns None if the iteration `index` must be executed.
        """
        found = list[LoopText]()
        steps = 0
        for i in range(index, len(self._items)):
            if i > self._index:
                self._advance_to(i)
            if self._node is None or self._others is None:
                break
            written = self._node.texts.get(self._others)
            if written is None:
                break
            found.append(written)
            steps += written.steps
            if steps > _MAX_STEPS:
                break
        if len(found) < 2:
            return found[0] if found else None
        return LoopText(
            "".join([each.text for each in found]),
            steps,
            sum([each.chars for each in found]),
            len(found),
        )

    def remember(self, written: LoopText) -> None:
        """Remembers what the current iteration wrote."""
        if self._node is not None and self._others is not None:
            self._memo.add_text(self._node, self._others, written)

    def take_work(self) -> int:
        """Returns the work since the last call."""
        work = self._work
        self._work = 0
        return work

    def _advance_to(self, index: int) -> None:
        """Moves to the next iteration, which has this index."""
        self._index = index
        node = self._node
        if node is None:
            return
        item = self._items[index]
        key = item.__plain__.key if type(item) is UnchangedDict else self._write(item)
        if key is None:
            self._node = None
            return
        self._node = node.children.get(key) or self._memo.add_child(node, key)
        self._others = b"" if index >= self._reads_only_items_from else self._write_others()

    def _write_others(self) -> bytes | None:
        """Returns as bytes what the current iteration reads besides the items so far and the
        constants. For `messages[loop.index0 + 1]`, this is the next message.

        The joined bytes are unambiguous: each piece is self-delimiting, and the index and the tree's
        key determine which pieces there are.
        """
        index = self._index
        length = len(self._items)
        reads = self._reads
        pieces = list[bytes | None]()
        if reads.last:
            pieces.append(b"1" if index + 1 == length else b"0")
        if reads.next:
            pieces.append(self._write_item(self._items, index + 1))
        for number, position in reads.neighbours:
            read = self._lists[number]
            at = position.compute(index, length)
            if read is not self._items or not 0 <= at <= index:
                pieces.append(self._write_item(read, at))
        known = [piece for piece in pieces if piece is not None]
        return b"".join(known) if len(known) == len(pieces) else None

    def _write_item(self, items: Sequence[UserValue], at: int) -> bytes | None:
        try:
            item = items[at]
        except IndexError:
            return _UNDEFINED
        return self._write(item)

    def _write(self, value: UserValue) -> bytes | None:
        """Returns a value as bytes, or as their digest. Writes each value once."""
        if type(value) is UnchangedDict:
            return value.__plain__.key
        known = self._bytes.get(id(value))
        if known is None:
            written = write_plain(value)
            self._work += written.work
            known = self._bytes[id(value)] = (value, written.key)
        return known[1]


def _find_first_self_contained(
    reads: LoopReads, items: Sequence[UserValue], lists: Sequence[Sequence[UserValue]]
) -> int:
    """Returns the index from which on iterations read only the items up to their own. Returns the
    number of items if there is none.
    """
    if reads.last or reads.next:
        return len(items)
    first = 0
    for number, position in reads.neighbours:
        if lists[number] is not items or position.by_length:
            return len(items)
        if position.by_index == 0 and position.constant >= 0:
            first = max(first, position.constant)
        elif position.by_index == 1 and position.constant <= 0:
            first = max(first, -position.constant)
        else:
            return len(items)
    return first
