"""Room for requests, and who comes next."""

import asyncio

from sglang_lite.protocol import RequestAbortedError
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket


class Submitting:
    """What submits, and ends what was submitted, the oldest first."""

    def __init__(self, most):
        self.open, self.under_way, self.submitted = OpenRequests(most), [], []

    async def submit(self, name, count):
        def submitted():
            ended = self.open.track(lambda event: None, count)
            self.under_way += [ended] * count
            self.submitted.append(name)
            return Ticket(lambda: None)

        await self.open.submit_once_admitted(submitted, count)

    def end(self, count=1):
        for _ in range(count):
            self.under_way.pop(0)(RequestAbortedError("over"))


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_wants_much_room_has_its_turn_before_those_who_come_later():
    async def main():
        room = Submitting(8)
        await asyncio.gather(*(room.submit("first", 1) for _ in range(8)))
        tasks = [asyncio.ensure_future(room.submit("many", 8))]
        await turns()
        for _ in range(8):
            tasks.append(asyncio.ensure_future(room.submit("later", 1)))
            await turns()
            room.end()
            await turns()
        room.end(8)
        await asyncio.gather(*tasks)
        return room.submitted

    assert asyncio.run(main()) == ["first"] * 8 + ["many"] + ["later"] * 8


def test_all_are_called_that_there_is_room_for():
    async def main():
        room = Submitting(8)
        await asyncio.gather(*(room.submit("first", 1) for _ in range(8)))
        tasks = [asyncio.ensure_future(room.submit("many", 8))]
        await turns()
        tasks += [asyncio.ensure_future(room.submit("later", 1)) for _ in range(4)]
        await turns()
        room.end(4)
        await turns()
        before = list(room.submitted)
        tasks[0].cancel()
        await asyncio.wait(tasks, timeout=60)
        return before, room.submitted

    before, after = asyncio.run(main())
    assert before == ["first"] * 8
    assert after == ["first"] * 8 + ["later"] * 4


def test_a_name_without_a_ticket_can_be_used_again():
    room = OpenRequests(1)
    for _ in range(2):
        room.track(lambda event: None, rid="x")(RequestAbortedError("over"))
    assert room.open_count == 0
