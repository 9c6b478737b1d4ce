"""The rules of a program, played at once in the order of submission, and random programs to play.
Both players are held to them: the engine's by `test_player.py`, and the caller's by
`tests/lang/execution/test_player_rules.py`.
"""

from dataclasses import dataclass

from sglang_lite.program.nodes import Fork, Gen, Join, Mark, Pause, Rollback, Text
from tests.counts import some


@dataclass(frozen=True)
class Ways:
    """What one of the players can be given.

    Attributes:
        engine: whether programs have nodes that only an engine is given: pauses, verdicts that come
            before the answer, forks without branches, and joins of all forks since the last one.
        again: what is added before a node is asked again.
        accepted: added to an answer that is accepted.
    """

    engine: bool
    again: str
    accepted: str


ENGINE = Ways(engine=True, again="r", accepted=".")
CALLER = Ways(engine=False, again="", accepted="")
SEQUENCES = some(1000, 5000)  # random programs that both players are given


def answer(prompt):
    """Answer to a prompt, or None if the node fails."""
    value = sum(prompt.encode()) % 100
    return None if value % 17 == 0 else f"<{value}>"


def verdict(value, attempt):
    """Verdict on an answer: "again", "accepted", or None if it is refused."""
    if value is None:
        return "again" if attempt < 1 else None
    number = int(value[1:-1])
    if number % 13 == 0:
        return None
    return "again" if number % 3 == 0 and attempt < 2 else "accepted"


class Plain:
    """A branch, played at once in the order of submission: what a node gives depends on nothing
    later.
    """

    def __init__(self, ways, path=(), text="P"):
        self.ways, self.values = ways, {}
        self.path, self.before, self.count, self.marks = path, text, 0, {}
        self.added, self.forks, self.failed, self.lost, self.removed = [], {}, False, False, False
        self.joins, self.asked, self.gathered = [-1], [], {}

    @property
    def text(self):
        return self.before + "".join(self.added)

    def add(self, node, tree, prompts):
        place, self.count = self.count, self.count + 1
        if isinstance(node, Rollback):
            if not self.lost and node.mark in self.marks:
                self.failed, self.added = False, list(self.marks[node.mark])
                self.marks = {at: each for at, each in self.marks.items() if at <= node.mark}
                for at in [at for at in self.forks if at > node.mark]:
                    for child in self.forks.pop(at):
                        child.lose(removed=True)
                self.asked = [key for key in self.asked if key[-1] <= node.mark]
                self.gathered = {at: keys for at, keys in self.gathered.items() if at <= node.mark}
                self.joins = [at for at in self.joins if at <= node.mark]
            return
        if isinstance(node, Fork):
            self.forks[place] = [
                Plain(self.ways, (*self.path, place, i), self.text)
                for i in range(len(node.branches))
            ]
            for child in self.forks[place]:
                tree[child.path] = child
                if self.failed:
                    child.lose()
        if isinstance(node, Join) and node.mode == "gather_variable" and not self.lost:
            trees = [each for child in self.forks[node.fork] for each in child.tree()]
            self.gathered[place] = [key for each in trees for key in each.asked]
        if self.failed:
            return
        match node:
            case Text(text):
                self.failed = text == "!"
                self.added += [text] * (not self.failed)
            case Gen():
                if node.name == "early":  # it may be decided before it is asked
                    prompts[(*self.path, place)] = self.text
                    self.added.append("e")
                else:
                    self.ask(place, node, prompts)
            case Pause():
                self.added.append("p")
                if place % 3 == 0:
                    self.ask(place, Gen("p"), prompts)
            case Mark():
                self.marks[place] = list(self.added)
            case Join(fork, mode="concate_and_append"):
                self.join(place, [self.forks[fork]] if fork is not None else self.since_join())

    def ask(self, place, node, prompts):
        key = (*self.path, place)
        self.asked.append(key)
        for attempt in range(3):
            prompts[(*key, *[-1] * attempt)] = self.text
            found = answer(self.text)
            outcome = verdict(found, attempt) if node.judged else "accepted"
            if outcome != "again":
                break
            self.added.append(self.ways.again)
        self.failed = found is None or outcome is None
        if not self.failed:
            self.values[key] = node.name, found
            self.added.append(found + self.ways.accepted if node.judged else found)

    def since_join(self):
        return [children for at, children in self.forks.items() if at > self.joins[-1]]

    def join(self, place, forks):
        children = [child for each in forks for child in each]
        self.joins.append(place)
        self.failed = any(child.failed for child in children)
        if not self.failed:
            for child in children:
                self.added += child.added

    def tree(self):
        """The branch and all that were forked from it."""
        for branch in (found := [self]):
            found += [child for children in branch.forks.values() for child in children]
        return found

    def lose(self, *, removed=False):
        """Fails for good: a rollback has removed its fork, or its parent had failed before it."""
        self.lost, self.failed, self.gathered = True, True, {}
        self.removed = self.removed or removed
        for children in self.forks.values():
            for child in children:
                child.lose(removed=removed)


def random_steps(draw, tree, ways):
    """Yields (path, node) in an order in which a program could be written; `tree` has the branches
    so far. Half of the forked branches begin with a mark, and many roll back to one of their marks
    once they are joined, because the rules on what a join has claimed are the hardest to keep.
    """
    for i in range(draw.randrange(5, 40)):
        paths = [path for path, each in tree.items() if not each.lost or draw.random() < 0.1]
        branch = tree[draw.choice(paths[-3:] if draw.random() < 0.3 else paths)]
        node = random_node(draw, branch, i, ways)
        if node is None:
            continue
        joined = [] if not isinstance(node, Join) else branch.forks.get(node.fork, [])
        back = [child for child in joined if child.marks and draw.random() < 0.5]
        marks = [draw.choice(list(child.marks)) for child in back]
        yield branch.path, node
        if isinstance(node, Fork) and branch.count - 1 in branch.forks:
            for child in branch.forks[branch.count - 1]:
                if draw.random() < 0.5 and not child.lost:
                    yield child.path, Mark()
        for child, mark in zip(back, marks):
            if not child.lost:
                yield child.path, Rollback(mark)


def random_node(draw, branch, i, ways):
    """Returns the i-th node of a program, or None where the branch can't have the one drawn."""
    kind = draw.random()
    if kind < 0.3:
        return Text("!" if draw.random() < 0.1 else f"t{i} ")
    if kind < 0.6:
        judged = kind < 0.42
        name = "early" if kind < 0.36 and ways.engine else f"x{i}"
        return Gen(name, judged=judged) if kind < 0.55 or not ways.engine else Pause()
    if kind < 0.72 and len(branch.path) < 6:
        return Fork(((),) * draw.randrange(0 if ways.engine else 1, 4))
    if kind < 0.82 and branch.forks:
        fork = draw.choice(list(branch.forks))
        if draw.random() < 0.5:
            return Join(fork, mode="gather_variable")
        if ways.engine and draw.random() < 0.3:
            return Join(None)
        ends = tuple(child.count for child in branch.forks[fork])
        return Join(fork, ends if draw.random() < 0.5 else ())
    if kind < 0.92:
        return Mark()
    return Rollback(draw.choice(list(branch.marks))) if branch.marks else None
