"""run_batch: every item, in order, whatever happens to one of them."""

import threading
import time

import pytest

import sglang_lite as sgl


@sgl.function
def square(s, x, y=0):
    s += f"{x} {y} " + sgl.gen("a")


def backend(**options):
    return sgl.ScriptedBackend(lambda call: str(int(call.prompt.text.split()[0]) ** 2), **options)


def test_results_are_in_order_and_finished():
    states = square.run_batch(
        [{"x": i} for i in range(30)], backend=backend(latency=lambda call: 0.03 - len(call.prompt.text) / 400)
    )
    assert [state.stream_executor._cells["a"].done for state in states] == [True] * 30
    assert [int(state["a"]) for state in states] == [i * i for i in range(30)]


def test_items_may_be_sequences_and_none_is_changed():
    items = [(2,), (3, 4), {"x": 5}]
    states = square.run_batch(items, backend=backend())
    assert [state.text() for state in states] == ["2 0 4", "3 4 9", "5 0 25"]
    assert items == [(2,), (3, 4), {"x": 5}]
    bound = square.bind(y=7)
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
    with pytest.raises(sgl.BatchError, match="2 of 4 programs failed, the first is item 1: body") as caught:
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
        [{"i": i} for i in range(10)], backend=sgl.ScriptedBackend(default="x", latency=0.005), num_threads=window
    )
    assert most == window


def test_the_generator_starts_only_what_is_asked_for():
    started = []

    @sgl.function
    def tracked(s, i):
        started.append(i)
        s += sgl.gen("a")

    states = tracked.run_batch(
        [{"i": i} for i in range(10)], backend=sgl.ScriptedBackend(default="x"), num_threads=2, generator_style=True
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
    square.run_batch([{"x": 1}, {"x": 2}], backend=script, temperature=0.3, max_new_tokens=5, seed=1)
    assert {(c.params.temperature, c.params.max_tokens) for c in script.calls} == {(0.3, 5)}
    assert script.calls[0].params.seed == script.calls[1].params.seed


@pytest.mark.parametrize("value", [0, "many", True, 1.5])
def test_num_threads_is_checked(value):
    with pytest.raises(sgl.ParameterError, match="num_threads"):
        square.run_batch([{"x": 1}], backend=backend(), num_threads=value)


def test_many_items_finish_soon():
    started = time.perf_counter()
    square.run_batch([{"x": i} for i in range(500)], backend=backend(latency=0.01), num_threads=100)
    assert time.perf_counter() - started < 5
