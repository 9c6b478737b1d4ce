"""An agent is killed with SIGKILL at random moments: what can't be repeated is not repeated, all
calls in doubt are listed, and no turn is lost.
"""

import itertools
import json
from collections import Counter

import pytest

from tests.children import in_a_child
from tests.counts import some
from tests.lang.killed_agents import TURNS, all_lives

PAYMENTS = {
    "tools": {10 * turn for turn in range(TURNS)},
    "code": {
        10 * turn + i
        for turn in range(TURNS)
        for i in range([3, 3, 1, 0][turn % 4])  # two programs, calls, and their answer
    },
}


def records(journal, kind):
    """Records of one kind in the whole lines of a journal."""
    found = []
    for line in journal:
        try:
            message = json.loads(line)
        except ValueError:  # the line was cut short
            continue
        if message["type"] == kind:
            found.append(message["data"])
    return found


def doubtful(life):
    """Calls of `pay` that were begun in a journal and have no result: read without the package."""
    ended = {each["call"] for each in records(life["journal"], "LoggedResult")}
    begun = records(life["journal"], "LoggedCall")
    return {
        json.loads(each["arguments"])["n"]
        for each in begun
        if each["tool"] == "pay" and each["call"] not in ended
    }


@pytest.mark.parametrize("mode", ["tools", "code"])
def test_a_killed_agent_repeats_nothing_and_loses_no_turn(tmp_path, mode):
    kills = some(3, 50)
    lives_of_agents = in_a_child(all_lives, str(tmp_path), 7, kills, mode)
    assert sum(life["killed"] for lives in lives_of_agents for life in lives) == kills
    for lives in lives_of_agents:
        end = lives[-1]
        assert max(Counter(end["paid"]).values()) == 1
        keys = {tuple(line.split()) for line in end["keyed"]}
        assert len(keys) == len({number for number, _ in keys})  # one key for each
        expected = {
            f"pay {number}" for life in lives if life["killed"] for number in doubtful(life)
        }
        assert set(end["doubted"]) == expected
        assert len(end["doubted"]) == len(expected)
        paid = set(map(int, end["paid"]))
        assert paid <= PAYMENTS[mode]
        unpaid = PAYMENTS[mode] - paid
        assert {f"pay {number}" for number in unpaid} <= expected
        for before, after in itertools.pairwise(lives):
            # what has a call in the journal was answered, and is not asked again
            done = {int(number) // 10 for number in before["paid"]}
            again = Counter(map(int, after["asked"])) - Counter(map(int, before["asked"]))
            assert not done & set(again)
        assert any('{"answer": "all paid"}' in line for line in end["end"][-2:])
