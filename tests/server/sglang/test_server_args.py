"""SGLang's ServerArgs: each field is a setting here, neutral, or refused with what to use; the docs
say which.
"""

import argparse
import dataclasses
import pickle
import re
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite import cli
from sglang_lite.server import flags
from sglang_lite.server.sglang.server_args import server_args, translate_engine_settings
from tests.server.sglang.server_args_table import table
from tests.server.sglang.surface import read_surface

DOCS = Path(__file__).parents[3] / "docs" / "compatibility.md"
NEUTRAL = [name for name, arg in server_args().items() if arg.support == "neutral"]


def test_the_table_has_the_fields_and_defaults_of_the_wheel():
    # its own bookkeeping
    fields = read_surface()["server_args"]
    theirs = {name: default for name, default in fields.items() if not name.startswith("_")}
    ours = {name: [] if arg.required else [arg.default] for name, arg in server_args().items()}
    assert ours == theirs
    assert len(ours) == 543


def test_every_setting_that_is_named_exists():
    settings = {field.name for field in dataclasses.fields(sgl.EngineConfig)}
    of_a_server = {field.name for field in dataclasses.fields(flags.ServerSettings)}
    for arg in server_args().values():
        if arg.support in ("engine", "server"):
            known = (
                settings | {"is_embedding"} if arg.support == "engine" else of_a_server
            )  # which Engine has by itself
            assert arg.meaning.removeprefix("not ") in known, arg.name
        elif arg.support == "neutral":
            assert arg.name not in settings | of_a_server, arg.name
            assert arg.meaning.endswith("."), arg.name


def test_the_docs_have_the_table():
    assert table() in DOCS.read_text(), "python -m tests.server.sglang.server_args_table prints it"


def test_a_default_changes_nothing_and_another_value_is_refused():
    for name in NEUTRAL:
        arg = server_args()[name]
        assert translate_engine_settings({name: arg.default}) == {}
        other = {
            "bool": not arg.default,
            "int": 12345,
            "float": 0.125,
            "str": "other",
            "list": ["other"],
        }
        with pytest.raises(sgl.ParameterError, match=f"^{name}: .* is not supported") as refused:
            translate_engine_settings({name: other.get(arg.kind, {"other": 1})})
        assert refused.value.hint == arg.meaning


@pytest.mark.parametrize(
    "given",
    [
        dict(eplb_min_rebalancing_utilization_threshold=1.0), dict(encoder_register_urls=[]), dict(device=None),
        dict(enable_custom_logit_processor=True), dict(max_queued_requests=None), dict(host="127.0.0.1"),
    ],
)  # fmt: skip
def test_what_says_nothing_changes_nothing(given):
    assert translate_engine_settings(given) == {}


@pytest.mark.parametrize(
    "given", [dict(dcp_size=True), dict(dcp_size=1.5), dict(encoder_register_urls=["a"])]
)
def test_what_looks_like_a_default_is_none(given):
    with pytest.raises(sgl.ParameterError, match="is not supported"):
        translate_engine_settings(given)


ALWAYS = ["enable_metrics", "skip_server_warmup", "enable_cache_report", "trust_remote_code"]


@pytest.mark.parametrize("name", ALWAYS)
def test_what_is_so_anyway_is_taken_with_a_line(name, caplog):
    with caplog.at_level("INFO", "sglang_lite"):
        assert translate_engine_settings({name: False}) == {}
        assert caplog.messages == []
        assert translate_engine_settings({name: True}) == {}
    assert caplog.messages == [f"{name} changes nothing. {server_args()[name].meaning}"]


def test_requests_are_logged_by_a_server_and_not_by_an_engine():
    with pytest.raises(sgl.ParameterError, match="log_requests: True is not supported"):
        translate_engine_settings({"log_requests": True})
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    _, engine, _ = flags.read_serve_flags(parser.parse_args(["--model", "m", "--log-requests"]))
    assert translate_engine_settings(engine)["model"] == "m"
    with pytest.raises(sgl.ParameterError, match="log_requests: log_level='error' hides them"):
        flags.read_serve_flags(
            parser.parse_args(["--model", "m", "--log-requests", "--log-level", "error"])
        )


def test_tokenizer_workers_are_a_servers_processes_for_large_bodies():
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    server, engine, _ = flags.read_serve_flags(
        parser.parse_args(["--model", "m", "--tokenizer-worker-num", "4"])
    )
    assert (server.body_processes, translate_engine_settings(engine)["model"]) == (4, "m")
    with pytest.raises(
        sgl.ParameterError, match=r"tokenizer_worker_num: 4 is not supported.*--body-processes"
    ):
        translate_engine_settings({"tokenizer_worker_num": 4})


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (dict(attention_backend="fa3"), 'Use "auto", for kernels of our own'),
        (dict(load_format="bitsandbytes"), 'Use "auto", which reads safetensors'),
        (dict(dcp_size=2), "Use tp_size; `sglang-lite serve --replicas` starts several engines."),
        (dict(cuda_graph_max_bs=8), "Leave it out: `max_running` bounds the batches"),
    ],
)
def test_what_is_refused_has_a_cure(given, cure, capsys):
    ((name, value),) = given.items()
    with pytest.raises(sgl.ParameterError, match=f"^{name}: ") as refused:
        translate_engine_settings(given)
    assert refused.value.hint.startswith(cure)
    with pytest.raises((sgl.ParameterError, SystemExit)) as ended:
        parser = argparse.ArgumentParser()
        flags.add_serve_flags(parser)
        _, engine, _ = flags.read_serve_flags(
            parser.parse_args([f"--{name.replace('_', '-')}", str(value)])
        )
        translate_engine_settings(engine)
    told = (
        ended.value.hint if isinstance(ended.value, sgl.ParameterError) else capsys.readouterr().err
    )
    assert cure in told


def test_values_of_sglang_are_translated():
    given = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}
    assert translate_engine_settings(given) == {"kv_dtype": "fp8", "attention_backend": "torch"}
    assert translate_engine_settings({"attention_backend": "fa4"}) == {
        "attention_backend": "flash_attn"
    }
    assert translate_engine_settings({"load_format": "layered"}) == {"load_format": "auto"}
    assert translate_engine_settings({"load_format": "fastsafetensors"}) == {
        "load_format": "safetensors"
    }
    for threads, asked in (
        (8, {"enable_multithread_load": True}),
        (3, '{"enable_multithread_load": true, "num_threads": 3}'),
    ):
        assert translate_engine_settings({"model_loader_extra_config": asked}) == {
            "load_threads": threads
        }
    with pytest.raises(sgl.ParameterError, match="not of enable_multithread_load and num_threads"):
        translate_engine_settings({"model_loader_extra_config": {"distributed": True}})
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    line = [
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--attention-backend",
        "torch_native",
        "--load-format",
        "auto",
    ]
    engine = translate_engine_settings(flags.read_serve_flags(parser.parse_args(line))[1])
    assert (engine["kv_dtype"], engine["attention_backend"], engine["load_format"]) == (
        "fp8",
        "torch",
        "auto",
    )


def test_quantising_while_loading_takes_the_format_that_is_named():
    for named, expected in (("modelopt_fp8", "fp8"), ("int4", "int4")):
        assert translate_engine_settings({"quantize_and_serve": True, "quantization": named}) == {
            "quantization": expected
        }
    assert translate_engine_settings({"quantize_and_serve": False, "quantization": "fp8"}) == {
        "quantization": "fp8"
    }
    with pytest.raises(
        sgl.ParameterError, match="quantize_and_serve: no format is named"
    ) as refused:
        translate_engine_settings({"quantize_and_serve": True})
    assert refused.value.hint == 'Give quantization="fp8", "int4", "int8" or "nf4".'


def test_a_setting_of_the_server_is_named_as_such():
    with pytest.raises(sgl.ParameterError, match=r"api_key: .*") as refused:
        sgl.Engine(api_key="secret", in_process=True)  # type: ignore[call-overload]  # wrong on purpose
    assert refused.value.hint == "It is a setting of `sglang-lite serve`."


def test_a_record_of_all_fields_is_taken():
    args = sgl.ServerArgs(
        "a/model", random_seed=3, disable_cuda_graph=True, chunked_prefill_size=-1
    )
    assert (args.tp_size, args.encoder_urls, args.watchdog_timeout) == (1, [], 300)
    settings = translate_engine_settings(dataclasses.asdict(args))
    assert {name: settings[name] for name in ("model", "seed", "cuda_graphs", "step_tokens", "policy")} == {
        "model": "a/model", "seed": 3, "cuda_graphs": False, "step_tokens": -1, "policy": "fcfs",
    }  # fmt: skip
    assert settings.pop("is_embedding") is False  # Engine's own
    assert sgl.EngineConfig.make(**settings).model == "a/model"
    assert pickle.loads(pickle.dumps(args)) == args
    with pytest.raises(sgl.ParameterError, match="nothing"):
        sgl.ServerArgs("a/model", nothing=1)
    with pytest.raises(TypeError):
        sgl.ServerArgs()


def test_a_command_line_makes_a_record():
    parser = argparse.ArgumentParser()
    parser.add_argument("--own")
    sgl.ServerArgs.add_cli_args(parser)
    read = parser.parse_args(
        ["--model-path", "m", "--enable-metrics", "--random-seed", "4", "--own", "x"]
    )
    args = sgl.ServerArgs.from_cli_args(read)
    assert args == sgl.ServerArgs("m", enable_metrics=True, random_seed=4)


def test_the_servers_command_takes_what_changes_nothing_and_hides_it():
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    given = [
        "--model",
        "m",
        "--dcp-size",
        "1",
        "--stream-interval",
        "1",
        "--no-trust-remote-code",
        "--watchdog-timeout",
        "300",
    ]
    _, engine, _ = flags.read_serve_flags(parser.parse_args(given))
    assert translate_engine_settings(engine)["model"] == "m"
    assert "dcp_size" not in translate_engine_settings(engine)
    assert not re.search(r"--watchdog-timeout\b", parser.format_help())
    _, engine, _ = flags.read_serve_flags(parser.parse_args(["--model", "m", "--dcp-size", "2"]))
    with pytest.raises(sgl.ParameterError, match="dcp_size: 2 is not supported"):
        translate_engine_settings(engine)


def test_a_setting_of_a_newer_sglang_is_refused_with_the_version_that_is_known(capsys):
    known = r"settings, those of version \d+\.\d+\.\d+ are known\."
    with pytest.raises(sgl.ParameterError, match=rf"^brand_new_flag: .*{known}"):
        sgl.Engine(model_path="m", brand_new_flag=3)
    with pytest.raises(sgl.ParameterError, match=rf"^brand_new_flag: .*{known}"):
        sgl.ServerArgs(model_path="m", brand_new_flag=3)
    with pytest.raises(sgl.ParameterError, match=r"^tp_siz: .* Did you mean tp_size=\?"):
        sgl.ServerArgs(model_path="m", tp_siz=2)
    with pytest.raises(SystemExit):
        cli.main(["serve", "--brand-new-flag", "3"])
    assert re.search(known, capsys.readouterr().err)
