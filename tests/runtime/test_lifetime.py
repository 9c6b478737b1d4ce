"""An engine's memory and its process: what ends it, what is left then, and who may not use it."""

import gc
import multiprocessing
import threading
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.program.nodes import Gen, Program
from sglang_lite.protocol import Delta, Regex, SamplingParams
from sglang_lite.runtime.core import engine_thread
from sglang_lite.runtime.structured_output.compiler import Compiler
from tests.runtime import scripted
from tests.runtime.models.tiny import VOCAB, save

GREEDY = SamplingParams(temperature=0, max_tokens=3)
CURE = "Start an engine in this process"


@sgl.function
def PROGRAM(s):
    s += "ab" + sgl.gen("x", max_tokens=3, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    return str(save(LlamaForCausalLM(config), tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def no_gc():
    """Memory is freed at once: by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "sglang_lite-engine"}


def started(make):
    """An engine, weak references to its model and itself, and its thread."""
    engine = make()
    return engine, weakref.ref(engine.core.runner.model), weakref.ref(engine), engine.core.thread


def tensor_bytes():
    return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) is torch.Tensor)


def use(engine):
    """Everything that might keep a reference to it."""
    engine.complete("ab", GREEDY)
    engine.complete("ab", GREEDY, Regex("[ab]{2}"))
    engine.select("ab", ["c", "d"])
    engine.play("ab", Program((Gen("x", GREEDY, Regex("[a-c]+")),)))
    engine.generate(["ab", "b"], {"max_new_tokens": 2}, rid=["1", "2"])
    list(engine.generate("ab", {"max_new_tokens": 2}, stream=True))
    engine.stats()


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_nobody_refers_to_is_freed(no_gc, folder, used):
    for _ in range(4):
        engine, model, itself, thread = started(
            lambda: sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
        )
        if used:
            use(engine)
        del engine
        assert itself() is None
        thread.join(30)
        assert not thread.is_alive()
        assert model() is None


def test_a_cell_that_is_run_again_holds_one_model(no_gc, folder):
    engine, model, _, thread = started(
        lambda: sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
    )
    one = tensor_bytes()
    for _ in range(3):
        engine = sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
        thread.join(30)
        thread = engine.core.thread
    assert model() is None
    assert tensor_bytes() == one
    engine.close()


def test_a_closed_engine_keeps_no_tensors(no_gc, folder):
    before = tensor_bytes()
    engine, model, _, _ = started(
        lambda: sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
    )
    use(engine)
    assert tensor_bytes() > before
    engine.close()
    assert model() is None
    assert tensor_bytes() == before
    assert engine.model_name == folder


def test_an_engine_that_crashed_or_did_not_start_keeps_no_tensors(
    no_gc, folder, monkeypatch, caplog
):
    before = tensor_bytes()
    engine = sgl.Engine(model=folder, max_total_tokens=512, in_process=True)

    def crash(self, hidden):
        raise LookupError("no logits")

    monkeypatch.setattr(type(engine.core.runner.model), "logits", crash)
    with pytest.raises(sgl.EngineClosedError, match="no logits") as crashed:
        engine.complete("ab")
    engine.close()
    caplog.clear()
    assert tensor_bytes() == before
    monkeypatch.setattr("sglang_lite.runtime.core.engine_core.StepLoop", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
    assert tensor_bytes() == before
    assert crashed.value.__cause__.__traceback__ is not None  # both errors are still there
    assert failed.value.__traceback__ is not None


def test_an_engine_whose_loop_can_not_be_made_closes_its_compiler(folder, monkeypatch):
    closed, close = [], Compiler.close

    def recorded(self):
        closed.append(self)
        close(self)

    monkeypatch.setattr(Compiler, "close", recorded)
    monkeypatch.setattr("sglang_lite.runtime.core.engine_core.StepLoop", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sgl.Engine(model=folder, max_total_tokens=512, in_process=True)
    assert len(closed) == 1


def test_an_interrupted_constructor_leaves_no_engine_behind(monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def interrupted(self, timeout=None):
        assert begun.wait(60)
        raise KeyboardInterrupt

    def slow(*args, build=engine_thread.EngineCore):
        begun.set()
        assert go.wait(60)
        return build(*args)

    monkeypatch.setattr(engine_thread, "EngineCore", slow)
    before = threads()
    with monkeypatch.context() as patch:
        patch.setattr("sglang_lite.runtime.core.engine_thread.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            Engine.of(scripted.loaded())
    (thread,) = threads() - before
    go.set()
    del caught
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_dropping_an_engine_fails_what_is_under_way():
    engine = Engine.of(scripted.loaded())
    events, done = [], threading.Event()

    def sink(event):
        if not isinstance(event, Delta):
            events.append(event)
            done.set()

    ticket = engine.submit("ab", SamplingParams(max_tokens=10**6, ignore_eos=True), sink=sink)
    engine.flush_cache()  # it has begun
    del engine
    assert done.wait(60)
    assert isinstance(events[0], sgl.EngineClosedError | sgl.protocol.Generation)
    ticket.abort()


def test_a_program_keeps_its_engine_until_it_ends():
    state = PROGRAM.run(backend=Engine.of(scripted.loaded()))
    gc.collect()
    assert state["x"]


# ------------------------------------------------------------------------------------ forked copies


def in_a_fork(call):
    """Words of `call` in a forked copy of this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child():
        try:
            theirs.send(f"returned {call()!r}")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=child)
    process.start()
    said = ours.recv() if ours.poll(60) else "nothing"
    process.kill()
    process.join()
    return said


CALLS = {
    "complete": lambda e: e.complete("ab", GREEDY),
    "constrained": lambda e: e.complete("ab", GREEDY, Regex("[ab]")),
    "select": lambda e: e.select("ab", ["c", "d"]),
    "play": lambda e: e.play("ab", Program((Gen("x", GREEDY),))),
    "submit": lambda e: e.submit("ab", sink=print),
    "submit_select": lambda e: e.submit_select("ab", ["c"], sink=print),
    "generate": lambda e: e.generate("ab"),
    "stream": lambda e: list(e.generate("ab", stream=True)),
    "score": lambda e: e.score("ab", ["c"]),
    "compile_grammar": lambda e: e.compile_grammar(Regex("[ab]+")),
    "stats": lambda e: e.stats(),
    "get_server_info": lambda e: e.get_server_info(),
    "flush_cache": lambda e: e.flush_cache(),
    "update_weights": lambda e: e.update_weights("smollm2-135m"),
    "abort": lambda e: e.abort("x"),
    "program": lambda e: PROGRAM.run(backend=e)["x"],
}


@pytest.fixture(scope="module")
def small(folder):
    with sgl.Engine(model=folder, max_total_tokens=512, in_process=True) as engine:
        use(engine)
        yield engine


@pytest.fixture
def held(small):
    """Every lock of the engine is held by some other thread when the process is copied."""
    core = small.core
    owners = core, core.open_requests, core.loop, core.loop.inbox, core.compiler
    locks = [
        each
        for owner in owners
        for each in vars(owner).values()
        if isinstance(each, type(threading.Lock()))
    ]
    assert len(locks) >= 4
    for lock in locks:
        lock.acquire()
    yield small
    for lock in locks:
        lock.release()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_forked_copy_is_told_to_start_its_own(held, call):
    said = in_a_fork(lambda: call(held))
    assert said.startswith("EngineClosedError: ")
    assert CURE in said


def test_a_forked_copy_does_not_wait_for_a_program_of_the_other_process():
    go = threading.Event()

    @sgl.function
    def program(s):
        s += sgl.gen("x") + "!"
        go.wait(30)

    backend = sgl.ScriptedBackend(lambda call: "done" if go.wait(30) else "")
    state = program.run(backend=backend, stream=True)
    for read in (
        lambda: state["x"],
        state.text,
        state.sync,
        lambda: state["y"],
        lambda: list(state.text_iter()),
    ):
        said = in_a_fork(read)
        assert said.startswith(
            "ProgramError: the program runs in the process that this one was forked from"
        )
    assert (
        in_a_fork(lambda: sgl.function(lambda s: s.__iadd__("a")).run(backend=backend).text())
        == "returned 'a'"
    )
    go.set()
    assert state.text() == "done!"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_can_start_its_own_and_drop_the_others(held):
    def child():
        held.close()
        with Engine.of(scripted.loaded()) as own:
            return PROGRAM.run(backend=own)["x"]

    sgl.set_default_backend(held)
    assert CURE in in_a_fork(lambda: PROGRAM.run()["x"])
    said = in_a_fork(child)
    sgl.set_default_backend(None)
    assert said.startswith("returned '")


def test_the_engine_lives_on_after_its_copies(small):
    small.compile_grammar(Regex("(a|b){1,9}" * 40))  # by a worker process
    assert "returned None" in in_a_fork(small.close)
    small.compile_grammar(Regex("(b|a){1,9}" * 40))
    assert len(small.complete("ab", GREEDY, Regex("[ab]{3}")).token_ids) == 3


# --------------------------------------------------------------------- calls on the engine's thread


@pytest.mark.parametrize(
    "name",
    ["stats", "complete", "select", "generate", "score", "play", "flush_cache", "update_weights"],
)
def test_a_call_that_waits_for_its_own_thread_is_refused(small, name):
    def processor(ids, logits):
        CALLS[name](small)

    with pytest.raises(sgl.ProgramError, match="logit_processor failed") as caught:
        small.generate("ab", {"max_new_tokens": 2}, custom_logit_processor=processor)
    assert "engine's own thread" in str(caught.value.__cause__)
    assert small.stats()["running"] == 0


def test_a_program_is_not_waited_for_on_an_engines_thread(small):
    def processor(ids, logits):
        CALLS["program"](small)

    with pytest.raises(sgl.ProgramError, match="logit_processor failed") as caught:
        small.generate("ab", {"max_new_tokens": 2}, custom_logit_processor=processor)
    assert "waiting here would stop an engine" in str(caught.value.__cause__)
