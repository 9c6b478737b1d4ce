"""Recognises texts of context-free languages with Earley's algorithm: exact, and without a grammar
engine.

Source: J. Earley, An efficient context-free parsing algorithm, CACM 13(2), 1970, over
automata of the rules' bodies.
"""

from __future__ import annotations

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.formal.terms import DEAD, State
from sglang_lite.protocol import ConstraintError

MAX_WORK = 3_000_000  # items processed, about six per character of an unambiguous text

# state in the body of a rule, name of the rule, and offset where it began
_Item = tuple[State, str, int]


def recognises(language: Language, text: str) -> bool:
    """Returns True if a text is in a language. Takes at most cubic time in the text's length.

    Raises:
        ConstraintError: the text is too ambiguous for the work limit.
    """
    return _Recogniser(language).run(text)


class _Recogniser:
    def __init__(self, language: Language) -> None:
        self._start = language.start
        self._automaton = Automaton(*language.rules.values())
        self._starts = dict(zip(language.rules, self._automaton.starts))

    def run(self, text: str) -> bool:
        automaton = self._automaton
        # per offset: items waiting for a rule that starts there
        self._waiting: list[dict[str, list[_Item]]] = []
        self._work = 0
        items: list[_Item] = [(self._starts[self._start], self._start, 0)]
        for at in range(len(text) + 1):
            done = self._complete(items, at)
            if at == len(text):
                return (self._start, 0) in done
            symbol = automaton.class_of(text[at])
            stepped = (
                (automaton.step(state, symbol), rule, origin) for state, rule, origin in items
            )
            items = list(dict.fromkeys(item for item in stepped if item[0] != DEAD))
            if not items:
                return False
        raise AssertionError("the loop returns")

    def _complete(self, items: list[_Item], at: int) -> set[tuple[str, int]]:
        """Completes the items at an offset: adds all items that follow without reading a character.
        Returns the (rule, origin) pairs that end there.
        """
        automaton = self._automaton
        waiting: dict[str, list[_Item]] = {}
        self._waiting.append(waiting)
        seen = set(items)
        done = set[tuple[str, int]]()

        def add_earley_item(item: _Item) -> None:
            self._work += 1
            if item[0] != DEAD and item not in seen:
                seen.add(item)
                items.append(item)

        for item in items:  # the list grows during the loop
            if self._work > MAX_WORK:
                raise ConstraintError(
                    "the text can be read in too many ways to tell whether the grammar allows it.",
                    hint="Give each text of the grammar one way to be read.",
                )
            self._work += 1
            state, rule, origin = item
            for name in automaton.next_rule_names(state):
                if name not in waiting:
                    waiting[name] = []
                    add_earley_item((self._starts[name], name, at))
                waiting[name].append(item)
                if (name, at) in done:  # the rule matched the empty text before this item was added
                    add_earley_item((automaton.step(state, name), rule, origin))
            if automaton.accepting(state) and (rule, origin) not in done:
                done.add((rule, origin))
                for state, above, began in self._waiting[origin].get(rule, ()):
                    add_earley_item((automaton.step(state, rule), above, began))
        return done
