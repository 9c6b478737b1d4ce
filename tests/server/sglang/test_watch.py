"""The comparison with SGLang's wheel, on a small package of its form, which is never imported."""

import pytest

import sglang_lite as sgl
from tests.server.sglang import watch
from tests.server.sglang.surface import read_decisions, read_surface
from tests.server.sglang.wheel import MovedError, read_wheel

FILES = {
    "__init__.py": 'raise SystemExit("imported")\n__all__ = ["gen", "conjure"]\n',
    "srt/arg_groups/fields/model.py": (
        "class Model:\n    model_path: str\n    watchdog_timeout: float = 5 * 60\n    spell: str = None\n"
        "    encoder_urls: list = field(default_factory=list)\n    stream_interval: int = 7\n    _own: int = 1\n"
    ),
    "srt/arg_groups/choices.py": (
        'LOAD_FORMAT_CHOICES = ["auto", "private", "scroll"]\nQUANTIZATION_CHOICES: list = ["fp8", "unquant", "rune"]\n'
    ),
    "srt/entrypoints/http_server.py": (
        "from sglang.srt.entrypoints.more import router as more_router\napp.include_router(more_router)\n"
        '@app.get("/health")\ndef health(): ...\n@app.api_route("/conjure", methods=["POST"])\n@guarded\n'
        'async def conjure(): ...\n@app.post(os.environ.get("ROUTE", "/vertex_generate"))\ndef vertex(): ...\n'
        "@app.get(_path)\ndef own(): ...\n"
    ),
    "srt/entrypoints/more.py": '@router.get("/slow_down")\ndef slow(): ...\n',
    "srt/entrypoints/engine.py": (
        "class Engine(Scores, EngineBase):\n    def generate(self): ...\n    async def conjure(self): ...\n"
        "    def _own(self): ...\n    def collective_rpc(self): ...\n"
    ),
    "srt/entrypoints/engine_scores.py": "class Scores:\n    def score(self): ...\n",
    "srt/entrypoints/EngineBase.py": "class EngineBase(ABC):\n    def divine(self): ...\n",
    "srt/function_call/function_call_parser.py": (
        'class Parser:\n    ToolCallParserEnum: dict = {"qwen": A, "beam": B, "elvish": C}\n'
    ),
    "srt/parser/reasoning_parser.py": 'class Parser:\n    DetectorMap = {"qwen3": A, "elvish": B}\n',
}
NEW = """\
server_args: spell is new
names: conjure is new
routes: /conjure is new
engine_methods: conjure is new
engine_methods: divine is new
tool_call_parsers: elvish is new
reasoning_parsers: elvish is new
quantizations: rune is new
load_formats: scroll is new"""


@pytest.fixture
def wheel(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_wheel_is_read_without_being_run(wheel):
    found = read_wheel(wheel)
    assert found["server_args"] == {
        "model_path": [], "watchdog_timeout": [300], "spell": [None], "encoder_urls": [[]], "stream_interval": [7],
        "_own": [1],
    }  # fmt: skip
    assert list(found["routes"]) == ["/conjure", "/health", "/slow_down", "/vertex_generate"]
    assert list(found["engine_methods"]) == [
        "collective_rpc", "conjure", "divine", "generate", "score",
    ]  # fmt: skip
    assert list(found["load_formats"]) == ["auto", "private", "scroll"]


def test_what_is_new_or_gone_or_has_another_default_is_printed(wheel, capsys):
    left = watch.main(wheel)
    assert [line for line in left if line.endswith(" is new")] == NEW.splitlines()
    assert "server_args: stream_interval has the default [7], and here [1]" in left
    assert "server_args: page_size is gone" in left
    assert "tool_call_parsers: inkling is gone, but decisions.tsv has it" in left
    assert "load_formats: surface.json differs from the wheel; --write corrects it" in left
    assert not any(": watchdog_timeout " in line or " private " in line for line in left)
    printed = capsys.readouterr().out
    assert "load_formats: 3 names, 1 of them here, 2 are not" in printed
    assert set(left) <= set(printed.splitlines())


def test_a_decision_on_what_is_here_is_out_of_date(monkeypatch):
    monkeypatch.setattr(watch, "read_decisions", lambda _: {"qwen": "why not"})
    found = watch.differences("tool_call_parsers", {"qwen": []})
    assert found == ["tool_call_parsers: qwen is here, but decisions.tsv has it"]


@pytest.mark.parametrize("name", FILES)
def test_what_has_moved_is_an_error(wheel, name):
    (wheel / "sglang" / name).write_text("")
    if name not in (
        "srt/entrypoints/more.py",
        "srt/entrypoints/engine_scores.py",
        "srt/entrypoints/EngineBase.py",
    ):
        with pytest.raises(MovedError):
            read_wheel(wheel)
    (wheel / "sglang" / name).unlink()
    if name not in ("srt/entrypoints/engine_scores.py", "srt/entrypoints/EngineBase.py"):
        with pytest.raises(MovedError):
            read_wheel(wheel)


def test_a_default_that_would_have_to_be_run_is_an_error(wheel):
    file = wheel / "sglang/srt/arg_groups/fields/model.py"
    file.write_text("class Model:\n    spell: str = open('a').read()\n")
    with pytest.raises(MovedError, match="is not a constant"):
        read_wheel(wheel)


@pytest.mark.parametrize("table", read_surface())
def test_each_name_of_the_wheel_is_here_or_has_a_reason(table):
    assert watch.differences(table, read_surface()[table]) == []
    assert all(read_decisions(table).values())


@pytest.mark.parametrize("setting", ["quantization", "load_format"])
def test_each_value_that_is_not_here_is_refused_with_a_cure(setting):
    for name in read_decisions(f"{setting}s"):
        with pytest.raises(
            sgl.ParameterError, match=f"^{setting}: '{name}' is SGLang's"
        ) as refused:
            watch.make_engine_config(setting, name)
        assert refused.value.hint
