"""Shared fixtures. The tests use no network: `make test` fetches the default model before."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import subprocess
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

# Before torch is there: the tests run on the CPU everywhere, and `make test-gpu` runs on a GPU what
# is made for one.
if not os.environ.get("SGLANG_LITE_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

# No test uses TLS, and many make clients, each of which would read all authorities of this machine.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

import sglang_lite as sgl

# other work on the machine is no failure
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


SLOW_TESTS = Path(__file__).parent / "slow_tests.txt"
# Seconds on the processor, which other work on the machine hardly changes: of a case, and of what a
# file's tests share.
SLOW, SLOW_FIXTURE = 0.01, 0.1
_fixtures: dict[tuple[str, str], float] = {}  # by scope and name, of the file whose tests are run
_slowest: dict[str, float] = defaultdict(float)  # of each test the longest case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-slow-tests", action="store_true", help=f"write {SLOW_TESTS.name} if all tests pass"
    )


def _processor_s() -> float:
    """What this process and those that it has waited for have computed."""
    return sum(os.times()[:4])


def _living_s(process: str = "self") -> float:
    """What the children of a process and theirs, which run still, have computed; 0 where the system
    does not tell.
    """
    total = 0.0
    with contextlib.suppress(OSError):  # one has ended
        for child in " ".join(
            each.read_text() for each in Path(f"/proc/{process}/task").glob("*/children")
        ).split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + _living_s(
                child
            )
    return total


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    # the process of an engine, for one, is waited for after the last test
    shared = fixturedef.scope == "module"
    before = _processor_s() + (_living_s() if shared else 0)
    try:
        return (yield)
    finally:
        after = _processor_s() + (_living_s() if shared else 0)
        _fixtures[fixturedef.scope, fixturedef.argname] = after - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Generator[None, object, object]:
    before = _processor_s()
    try:
        return (yield)
    finally:
        own, shared = (
            sum(_fixtures.get((scope, name), 0.0) for name in item.fixturenames)
            for scope in ("function", "module")
        )
        spent = max(_processor_s() - before + own, shared * SLOW / SLOW_FIXTURE)
        item.user_properties.append(("processor_s", spent))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, spent in report.user_properties:
        if report.when == "call" and name == "processor_s" and isinstance(spent, float):
            _slowest[_test(report.nodeid)] = max(_slowest[_test(report.nodeid)], spent)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A test leaves the list at half the time at which it enters it, so the list seldom changes."""
    if (
        not session.config.option.write_slow_tests
        or exitstatus
        or hasattr(session.config, "workerinput")
    ):
        return
    before = SLOW_TESTS.read_text().splitlines()
    slow = [
        test for test, spent in _slowest.items() if spent > (SLOW / 2 if test in before else SLOW)
    ]
    SLOW_TESTS.write_text("".join(f"{test}\n" for test in sorted(slow)))


def _test(case: str) -> str:
    """The name of a case's test, without its parameters."""
    return case.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are slow get their mark. Of a test marked `sampled(n)` a case in n is run, with
    each commit others: all of them are many of a kind. All are run with `SGLANG_LITE_CASES=all`,
    and where tests are chosen by name.
    """
    slow = set(SLOW_TESTS.read_text().splitlines())
    for item in items:
        if _test(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
    if (
        os.environ.get("SGLANG_LITE_CASES", "some") == "all"
        or config.option.keyword
        or "::" in "".join(config.args)
    ):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(_test(item.nodeid), []).append(item)
    left_out = {case for each in cases.values() for case in _left_out(each)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _left_out(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of a test but one of every n, and of the n after them the next one: the same one of
    each n would always have the same value of a parameter that has n.
    """
    mark = cases[0].get_closest_marker("sampled")
    assert mark is not None
    n = min(mark.args[0], len(cases))
    for i, case in enumerate(cases):
        if (i + i // n + _commit()) % n:
            yield case


@cache
def _commit() -> int:
    """A number that changes with the commit; 0 outside of a repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return int(asked.stdout[:8], 16) if asked.returncode == 0 else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and collected goes away: no collection of garbage looks for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules that are imported and collected stay: no later collection of garbage looks at them.
    And torch's forty loggers pass on what they are told: pytest adds its handlers to each logger
    that does not, six times a test.
    """
    gc.freeze()
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "torch":
            logging.getLogger(name).propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Objects that the tests of a file leave behind stay, too: modules they imported, caches,
    engines of the session. Each of hundreds of full collections looked at millions of such
    objects.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _fixtures.clear()
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    """Objects that were kept from the collector are given back after pytest's own last collections,
    which would look for seconds: at its end Python finds what Triton's kernels hold.
    """
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The default model's GGUF file. Where it was not fetched, tests that need it are skipped; in
    CI they fail.
    """
    from sglang_lite.runtime.host.cache_folder import cache_folder

    path = cache_folder() / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(
            f"needs the default model: {path} is missing; run `sglang-lite models pull smollm2-135m` (make test does)"
        )
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which has the libraries that are compiled on this machine."""
    from sglang_lite.runtime.models.resolve import cache_folder

    cache, compiled = tmp_path / "cache", cache_folder() / "compiled"
    compiled.mkdir(exist_ok=True, parents=True)
    cache.mkdir()
    (cache / "compiled").symlink_to(compiled)
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def small_file(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with the default model's tokenizer and a few random weights."""
    from tests.runtime.models import small_gguf

    return small_gguf.write(tmp_path_factory.mktemp("small") / "small.gguf", model_file)


@pytest.fixture(scope="session")
def small_engine(small_file: Path) -> Iterator[sgl.Engine]:
    """An engine with the default model's tokens whose texts mean nothing: a token costs a thirtieth
    of the model's.
    """
    with sgl.Engine(small_file, dtype="float32", in_process=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm(model_file: Path) -> Iterator[sgl.Engine]:
    """An engine with the default model, shared by the tests that only read from it. In float32,
    where no near tie between tokens falls differently in another batch.
    """
    with sgl.Engine(dtype="float32", in_process=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def engine(smollm: sgl.Engine) -> sgl.Engine:
    return smollm


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two small checkpoints of one architecture, with other weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.runtime.models.tiny import VOCAB, save

    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=1, initializer_range=0.3,
        )  # fmt: skip
        made.append(str(save(LlamaForCausalLM(config), tmp_path_factory.mktemp("tiny"))))
    return made


@pytest.fixture(autouse=True, scope="session")
def _cold_constraints() -> Iterator[None]:
    """Hundreds of small engines, most without a constraint: no process is started for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sglang_lite.runtime.structured_output.compiler.Compiler.warm_up", lambda self: []
        )
        yield


@pytest.fixture(autouse=True)
def _no_default_backend() -> Iterator[None]:
    """Each test sets the default backend it wants."""
    sgl.global_config.default_backend = None
    yield
    sgl.global_config.default_backend = None
