"""run_batch: every item, in order, whatever happens to one of them."""

import threading
from typing import Any

import pytest

import sglang_lite as sgl
from tests.children import in_a_child, interrupted
from tests.lang.fakes import Answers, Gated, Meeting, within


@sgl.function
def square(s, x, y=0):
    s += f"{x} {y} " + sgl.gen("a")


def backend(**options):
    return sgl.ScriptedBackend(lambda call: str(int(call.prompt.text.split()[0]) ** 2), **options)


def test_results_are_in_order_and_finished():
    states = square.run_batch(
        [{"x": i} for i in range(30)],
        backend=backend(latency=lambda call: 0.03 - len(call.prompt.text) / 400),
    )
    assert [state.branch.names.variables["a"].done for state in states] == [True] * 30
    assert [int(state["a"]) for state in states] == [i * i for i in range(30)]


def test_items_may_be_sequences_and_none_is_changed():
    items: list[Any] = [(2,), (3, 4), {"x": 5}]
    states = square.run_batch(items, backend=backend())
    assert [state.text() for state in states] == ["2 0 4", "3 4 9", "5 0 25"]
    assert items == [(2,), (3, 4), {"x": 5}]
    bound = square.bind(y=7)  # type: ignore[call-arg]  # some of them, which type checkers refuse
    item = {"x": 1}
    assert bound.run_batch([item], backend=backend())[0].text() == "1 7 1"
    assert item == {"x": 1}


def test_empty_batches():
    assert square.run_batch([], backend=backend()) == []
    assert list(square.run_batch([], backend=backend(), generator_style=True)) == []


def test_items_that_do_not_fit_are_refused_before_anything_runs():
    script = backend()
    with pytest.raises(sgl.ParameterError, match=r"batch_kwargs\[1\]: square: too many positional"):
        square.run_batch([(1,), (1, 2, 3)], backend=script)
    with pytest.raises(sgl.ParameterError, match=r"batch_kwargs\[0\].*'z'"):
        square.run_batch([{"x": 0, "z": 1}], backend=script)
    assert script.calls == []


def test_a_failing_item_does_not_take_the_others_with_it():
    @sgl.function
    def fragile(s, x):
        if x == 1:
            raise LookupError("body")
        s += f"{x}" + sgl.gen("a")

    script = sgl.ScriptedBackend({"2": ValueError("node"), "0": "zero", "3": "three"})
    with pytest.raises(
        sgl.BatchError, match="2 of 4 programs failed, the first is item 1: LookupError: body"
    ) as caught:
        fragile.run_batch([{"x": i} for i in range(4)], backend=script)
    results = caught.value.results
    assert results[0]["a"] == "zero"
    assert isinstance(results[1], LookupError)
    assert isinstance(results[2], sgl.ProgramError)
    assert results[3]["a"] == "three"


@pytest.mark.parametrize("window", [1, 3])
def test_no_more_than_num_threads_are_under_way(window):
    running, most = 0, 0
    lock = threading.Lock()

    @sgl.function
    def counted(s, i):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        s += sgl.gen("a")
        s["a"]
        with lock:
            running -= 1

    counted.run_batch(
        [{"i": i} for i in range(4 * window)], backend=Meeting(window), num_threads=window
    )
    assert most == window


def test_the_generator_starts_only_what_is_asked_for():
    started = []

    @sgl.function
    def tracked(s, i):
        started.append(i)
        s += sgl.gen("a")

    states = tracked.run_batch(
        [{"i": i} for i in range(10)],
        backend=sgl.ScriptedBackend(default="x"),
        num_threads=2,
        generator_style=True,
    )
    assert started == []
    assert next(states)["a"] == "x"
    assert len(started) <= 4
    assert len(list(states)) == 9


def test_the_generator_raises_a_failed_item():
    @sgl.function
    def failing(s, i):
        raise LookupError(str(i))

    with pytest.raises(LookupError):
        list(failing.run_batch([{"i": 0}], backend=sgl.ScriptedBackend(), generator_style=True))


def test_async_programs_need_no_threads():
    @sgl.function
    async def program(s, x):
        s += f"{x} " + sgl.gen("a")
        return int(await s.get("a"))

    threads = set()

    @sgl.function
    async def failing(s, x):
        threads.add(threading.current_thread().name)
        raise LookupError(str(x))

    states = program.run_batch([{"x": i} for i in range(50)], backend=backend(latency=0.01))
    assert [state.ret_value for state in states] == [i * i for i in range(50)]
    with pytest.raises(sgl.BatchError, match="3 of 3"):
        failing.run_batch([{"x": i} for i in range(3)], backend=backend())
    assert len(threads) == 1


def test_the_progress_bar_tells_tokens_and_cache(capsys):
    square.run_batch([{"x": i} for i in range(3)], backend=backend(), progress_bar=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown
    assert "cached" in shown


def test_settings_hold_for_every_item():
    script = backend()
    square.run_batch(
        [{"x": 1}, {"x": 2}], backend=script, temperature=0.3, max_new_tokens=5, seed=1
    )
    assert {(c.params.temperature, c.params.max_tokens) for c in script.calls} == {(0.3, 5)}
    assert script.calls[0].params.seed == script.calls[1].params.seed


@pytest.mark.parametrize("value", [0, "many", True, 1.5])
def test_num_threads_is_checked(value):
    with pytest.raises(sgl.ParameterError, match="num_threads"):
        square.run_batch([{"x": 1}], backend=backend(), num_threads=value)


def test_so_many_items_run_at_the_same_time():
    states = within(
        3,
        lambda: square.run_batch(
            [{"x": i} for i in range(500)], backend=Meeting(100), num_threads=100
        ),
    )
    assert len(states) == 500


# ----------------------------------------------------------------------------------------- policies


@sgl.function
def fragile(s, i):
    """Items 1 and 3 fail, one in its body and one in its node."""
    if i == 1:
        raise LookupError("body of 1")
    s += f"{i} " + sgl.gen("a")


def fragile_script():
    return sgl.ScriptedBackend({"3 ": ValueError("node of 3")}, default="fine")


ITEMS = [{"i": i} for i in range(5)]


def test_on_error_return_puts_the_exception_into_its_place():
    results = fragile.run_batch(ITEMS, backend=fragile_script(), on_error="return")
    assert [type(r) for r in results] == [
        sgl.ProgramState, LookupError, sgl.ProgramState, sgl.ProgramError, sgl.ProgramState
    ]  # fmt: skip
    assert [results[i]["a"] for i in (0, 2, 4)] == ["fine"] * 3
    assert isinstance(results[3].__cause__, ValueError)


def test_on_error_skip_leaves_it_out():
    results = fragile.run_batch(ITEMS, backend=fragile_script(), on_error="skip")
    assert [state.text() for state in results] == ["0 fine", "2 fine", "4 fine"]


def test_on_error_raise_carries_what_return_would_give():
    with pytest.raises(
        sgl.BatchError, match="2 of 5 programs failed, the first is item 1: LookupError: body of 1"
    ) as caught:
        fragile.run_batch(ITEMS, backend=fragile_script())
    assert [isinstance(r, Exception) for r in caught.value.results] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_failed_node_of_a_batch_is_told_with_its_line_once():
    @sgl.function
    def asks(s, x):
        s += sgl.gen("a")

    with pytest.raises(sgl.BatchError) as caught:
        asks.run_batch([{"x": 1}, {"x": 2}], backend=sgl.ScriptedBackend({"": ValueError("no")}))
    assert caught.value.where is not None
    assert str(caught.value).count(f"{__file__}:{asks.func.__code__.co_firstlineno + 2}") == 1


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("policy", ["return", "skip"])
def test_the_policies_hold_for_iterators_too(policy, ordered):
    yielded = fragile.run_batch(
        ITEMS,
        backend=fragile_script(),
        on_error=policy,
        ordered=ordered,
        generator_style=True,
        num_threads=2,
    )
    numbered = list(enumerate(yielded)) if ordered else sorted(yielded, key=lambda pair: pair[0])
    if ordered and policy == "skip":
        numbered = list(zip((0, 2, 4), [r for _, r in numbered]))
    assert [i for i, r in numbered if not isinstance(r, Exception)] == [0, 2, 4]
    assert [i for i, r in numbered if isinstance(r, Exception)] == (
        [1, 3] if policy == "return" else []
    )
    assert all(r.text() == f"{i} fine" for i, r in numbered if not isinstance(r, Exception))


def test_an_iterator_yields_what_comes_before_a_failure():
    states = fragile.run_batch(ITEMS, backend=fragile_script(), generator_style=True)
    assert next(states).text() == "0 fine"
    with pytest.raises(LookupError, match="body of 1"):
        next(states)
    with pytest.raises(StopIteration):
        next(states)


@pytest.mark.parametrize("policy", ["ignore", "", None])
def test_the_policy_is_checked_before_anything_runs(policy):
    script = backend()
    with pytest.raises(sgl.ParameterError, match="on_error"):
        square.run_batch([{"x": 1}], backend=script, on_error=policy)
    assert script.calls == []


# ---------------------------------------------------------------------------------------- iterators


class Gates:
    """A program each item of which waits for its gate."""

    def __init__(self, count):
        self.gates = [threading.Event() for _ in range(count)]
        self.started = []

        @sgl.function
        def program(s, i):
            self.started.append(i)
            assert self.gates[i].wait(60)
            s += f"{i}"

        self.program = program
        self.items = [{"i": i} for i in range(count)]

    def run(self, **options):
        return self.program.run_batch(
            self.items, backend=sgl.ScriptedBackend(), generator_style=True, **options
        )


def test_unordered_results_come_as_they_finish():
    gated = Gates(3)
    results = gated.run(ordered=False, num_threads=3)
    for i in (2, 0, 1):
        gated.gates[i].set()
        index, state = next(results)
        assert (index, state.text()) == (i, str(i))
    assert list(results) == []


def test_ordered_results_wait_for_the_first():
    gated = Gates(3)
    results = gated.run(num_threads=3)
    for i in (2, 1, 0):
        gated.gates[i].set()
    assert [state.text() for state in results] == ["0", "1", "2"]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_an_iterator_never_has_more_runs_than_the_window_that_nobody_has_taken(window):
    started = []

    @sgl.function
    def tracked(s, i):
        started.append(i)
        s += sgl.gen("a")

    results = tracked.run_batch(
        [{"i": i} for i in range(20)],
        backend=sgl.ScriptedBackend(default="x"),
        num_threads=window,
        ordered=False,
    )
    for taken, _ in enumerate(results, 1):
        assert len(started) <= taken - 1 + window
    assert sorted(started) == list(range(20))


def test_an_iterator_that_is_left_starts_nothing_more():
    gated = Gates(50)
    gated.gates[0].set()
    results = gated.run(num_threads=2, ordered=False)
    next(results)
    results.close()
    for gate in gated.gates:
        gate.set()
    assert len(gated.started) <= 3


def holding(gated, is_async):
    """A program whose first item is answered, and whose others are not."""

    def plain(s, i):
        s += f"{i}" + sgl.gen("a", backend=Answers(str) if i == 0 else gated)
        return s["a"]

    async def coroutine(s, i):
        s += f"{i}" + sgl.gen("a", backend=Answers(str) if i == 0 else gated)
        return await s.get("a")

    return sgl.function(coroutine if is_async else plain)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_iterator_that_is_left_stops_what_is_under_way(is_async):
    gated = Gated()
    results = holding(gated, is_async).run_batch(
        [(i,) for i in range(3)], backend=gated, generator_style=True
    )
    assert next(results)["a"] == "0"
    assert gated.asked.wait(60)
    results.close()
    assert gated.cancelled.wait(60)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_stops_what_is_under_way(is_async):
    assert in_a_child(interrupt_stops_what_is_under_way, is_async)


def interrupt_stops_what_is_under_way(is_async):
    gated = Gated()
    batch = [(i,) for i in range(3)]
    interrupted(
        lambda: holding(gated, is_async).run_batch(batch, backend=gated), gated.asked.is_set
    )
    return gated.cancelled.wait(60)


def test_coroutines_have_the_same_iterators():
    import asyncio

    async def main():
        ordered = square.arun_batch(
            [(i,) for i in range(6)], backend=backend(), generator_style=True, num_threads=2
        )
        unordered = square.arun_batch([(i,) for i in range(6)], backend=backend(), ordered=False)
        skipping = fragile.arun_batch(
            ITEMS, backend=fragile_script(), on_error="skip", generator_style=True
        )
        with pytest.raises(sgl.BatchError, match="2 of 5"):
            await fragile.arun_batch(ITEMS, backend=fragile_script())
        return (
            [state.text() async for state in await ordered],
            sorted([(i, state.text()) async for i, state in await unordered]),
            [state.text() async for state in await skipping],
            await square.arun_batch([], backend=backend()),
        )

    expected = [f"{i} 0 {i * i}" for i in range(6)]
    assert asyncio.run(main()) == (
        expected,
        list(enumerate(expected)),
        ["0 fine", "2 fine", "4 fine"],
        [],
    )


def test_a_batch_that_can_not_start_says_so_to_coroutines_too(monkeypatch):
    import asyncio

    class Broken:
        def __init__(self, program, plan, report, *, until_released):
            self.stopped = False

        def start(self):
            raise RuntimeError("can't start new thread")

        def stop(self):
            self.stopped = True

    class Cluster:
        def rows(self, items):
            return items

        def pool(self, *settings, **held):
            return Broken(*settings, **held)

        def identity(self):
            return "broken"

    async def main():
        await asyncio.wait_for(square.arun_batch([(1,)], cluster=Cluster()), 60)

    with pytest.raises(RuntimeError, match="can't start"):
        asyncio.run(main())


# ------------------------------------------------------------------------------------------ items


def test_nothing_that_is_given_is_changed():
    shared = {"deep": [1]}

    @sgl.function
    def greedy(s, a, b, *rest, **more):
        s += f"{a} {b}"
        more["c"] = 1

    items: list[Any] = [{"a": shared, "b": [2], "d": 3}, (shared, 4, 5), [shared, 6]]
    before = repr(items)
    greedy.run_batch(items, backend=sgl.ScriptedBackend())
    bound = greedy.bind(b=9)  # type: ignore[call-arg]  # some of them, which type checkers refuse
    bound.run_batch([{"a": shared}], backend=sgl.ScriptedBackend())
    assert repr(items) == before
    assert bound.bind_arguments == {"b": 9}
    assert items[0]["a"] is shared


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{}], r"batch_kwargs\[0\]: square: missing a required argument: 'x'"),
        ([()], r"batch_kwargs\[0\]: square: missing a required argument: 'x'"),
        ([{"x": 1}, (1, 2, 3)], r"batch_kwargs\[1\]: square: too many positional arguments"),
        (
            [{"x": 1}, {"x": 1, "y": 2, "z": 3}],
            r"batch_kwargs\[1\]: square: got an unexpected keyword argument 'z'",
        ),
    ],
)
@pytest.mark.parametrize("generator_style", [True, False])
def test_an_item_that_does_not_fit_is_named(items, message, generator_style):
    script = backend()
    with pytest.raises(sgl.ParameterError, match=message):
        square.run_batch(items, backend=script, generator_style=generator_style)
    assert script.calls == []


@pytest.mark.parametrize(
    "options", [{}, {"progress_bar": True}, {"checkpoint": "kept.jsonl"}, {"num_threads": 1}]
)
def test_an_empty_batch_is_an_empty_list(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert square.run_batch([], backend=backend(), **options) == []


def test_the_progress_bar_counts_failures_too(capsys):
    fragile.run_batch(ITEMS, backend=fragile_script(), on_error="skip", progress_bar=True)
    assert "5/5" in capsys.readouterr().err


def test_a_batch_inside_a_program_and_inside_an_event_loop():
    import asyncio

    @sgl.function
    def outer(s):
        s += ",".join(state["a"] for state in square.run_batch([(2,), (3,)], backend=backend()))

    async def notebook():
        return outer.run(backend=sgl.ScriptedBackend()).text()

    assert outer.run(backend=sgl.ScriptedBackend()).text() == asyncio.run(notebook()) == "4,9"


def test_an_ordered_iterator_is_no_further_ahead_than_its_window():
    started, starts, slow = [], threading.Semaphore(0), threading.Event()

    @sgl.function
    def program(s, i):
        started.append(i)
        starts.release()
        if i == 0:
            slow.wait()
        s += sgl.gen("x")

    items = [{"i": i} for i in range(50)]
    states = program.run_batch(
        items, backend=sgl.ScriptedBackend(), num_threads=4, generator_style=True
    )
    taker = threading.Thread(target=lambda: next(states))
    taker.start()
    assert all(starts.acquire(timeout=60) for _ in range(4))
    slow.set()
    taker.join()
    assert len(started) <= 5
    assert len(list(states)) == 49


@pytest.mark.parametrize("item", ["text", 3, None])
def test_items_that_are_no_arguments_are_refused_before_anything_runs(item):
    asked = backend()
    with pytest.raises(sgl.ParameterError, match=r"batch_kwargs\[1\]"):
        square.run_batch([{"x": 1}, item], backend=asked)
    assert not asked.calls


def test_a_bad_setting_is_refused_before_anything_runs_and_for_no_items_too():
    with pytest.raises(sgl.ParameterError, match="timeout"):
        square.run_batch([], backend=backend(), timeout=-1)


@pytest.mark.parametrize("items", [[], [{"x": 1}, {"x": 2}]])
@pytest.mark.parametrize("given", [5, "gpt-4", sgl.Engine])
def test_what_is_no_backend_is_refused_at_the_callers_line_before_anything_runs(items, given):
    with pytest.raises(sgl.ParameterError, match=r"backend: .*test_batch\.py"):
        square.run_batch(items, backend=given, on_error="return")


def test_all_rows_have_one_backend():
    class Hooks(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return "4", {}

    states = square.run_batch([{"x": 1}, {"x": 2}, {"x": 3}], backend=Hooks())
    assert len({id(state.branch.backend) for state in states}) == 1


# -------------------------------------------------------------------------------------- equal items


@sgl.function
def draws(s, x=0):
    s += "x" + sgl.gen("a")


def seeds(items, **options):
    """Seeds of the calls, in the order of the items."""
    backend = sgl.ScriptedBackend(default="y")
    draws.run_batch(items, backend=backend, num_threads=1, **options)
    return [call.params.seed for call in backend.calls]


def test_an_item_has_the_seed_of_a_run_and_equal_items_are_warned_about():
    backend = sgl.ScriptedBackend(default="y")
    draws.run(backend=backend, seed=1).sync()
    (alone,) = [call.params.seed for call in backend.calls]
    with pytest.warns(
        UserWarning, match=r"items 0 and 1 are equal, and with seed=1 so are their answers.*s\.fork"
    ) as w:
        assert seeds([{}] * 50, seed=1) == [alone] * 50
    assert w[0].filename == __file__
    assert len(w) == 1


def test_items_that_differ_or_have_no_seed_are_not_warned_about():
    class Odd:
        __hash__ = None  # type: ignore[assignment] # as Python means it for values without a hash

        def __eq__(self, other):
            raise ValueError("as arrays do")

    seeds([{}] * 3)
    seeds([{}] * 3, seed=2, temperature=0)
    seeds(
        [
            {"x": 1},
            {"x": True},
            {"x": 1.0},
            {},
            ("1",),
            {"x": [1]},
            {"x": [2]},
            {"x": Odd()},
            {"x": Odd()},
        ],
        seed=3,
    )
    with pytest.warns(UserWarning, match="items 1 and 2 are equal"):
        seeds([{"x": 1}, {"x": [1]}, {"x": [1]}], seed=4)
    with pytest.warns(UserWarning, match="items 0 and 2 are equal"):
        seeds([(1,), (2,), (1,)], seed=5)
