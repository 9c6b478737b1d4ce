"""SGLang 0.5.23's frontend is here: names, modules, signatures and the shapes of results.

The signatures are those of its wheel, written down as data. docs/compatibility.md is the table of
what is here.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.lang import ir
from tests.server.sglang.surface import read_surface

SAMPLING = (
    "max_new_tokens=128, n=1, stop=None, stop_token_ids=None, stop_regex=None, temperature=1.0, top_p=1.0, top_k=-1, "
    "min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0, ignore_eos=False, return_logprob=None, "
    "logprob_start_len=None, top_logprobs_num=None, return_text_in_logprobs=None"
)
GEN_SHORT = (
    "name=None, max_tokens=None, n=None, stop=None, stop_token_ids=None, stop_regex=None, temperature=None, "
    "top_p=None, top_k=None, min_p=None, frequency_penalty=None, presence_penalty=None, ignore_eos=None, "
    "return_logprob=None, logprob_start_len=None, top_logprobs_num=None, return_text_in_logprobs=None"
)
LOGPROBS = "choices, normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs"

# Module and name, with SGLang's parameters: "*" parts those that are given by name.
SIGNATURES = {
    "lang.api:function": "func=None, num_api_spec_tokens=None",
    "lang.api:set_default_backend": "backend",
    "lang.api:flush_cache": "backend=None",
    "lang.api:get_server_info": "backend=None",
    "lang.api:gen": (
        "name=None, max_tokens=None, min_tokens=None, n=None, stop=None, stop_token_ids=None, stop_regex=None, "
        "temperature=None, top_p=None, top_k=None, min_p=None, frequency_penalty=None, presence_penalty=None, "
        "ignore_eos=None, return_logprob=None, logprob_start_len=None, top_logprobs_num=None, "
        "return_text_in_logprobs=None, dtype=None, choices=None, choices_method=None, regex=None, json_schema=None"
    ),
    "lang.api:gen_int": GEN_SHORT,
    "lang.api:gen_string": GEN_SHORT,
    "lang.api:select": "name=None, choices=None, temperature=0.0, choices_method=token_length_normalized",
    "lang.api:image": "expr",
    "lang.api:video": "path, num_frames",
    "lang.api:system": "expr=None",
    "lang.api:user": "expr=None",
    "lang.api:assistant": "expr=None",
    "lang.api:system_begin": "",
    "lang.api:system_end": "",
    "lang.api:user_begin": "",
    "lang.api:user_end": "",
    "lang.api:assistant_begin": "",
    "lang.api:assistant_end": "",
    "lang.api:separate_reasoning": "expr=None, model_type=None",
    "lang.ir:SglFunction": "func, num_api_spec_tokens=None, bind_arguments=None",
    "lang.ir:SglFunction.run": f"*args, {SAMPLING}, stream=False, backend=None, use_thread=True, **kwargs",
    "lang.ir:SglFunction.run_batch": (
        f"batch_kwargs, *, {SAMPLING}, backend=None, num_threads='auto', progress_bar=False, generator_style=False"
    ),
    "lang.ir:SglFunction.trace": "*, backend=None, **kwargs",
    "lang.ir:SglFunction.cache": "backend=None",
    "lang.ir:SglFunction.bind": "**kwargs",
    "lang.ir:SglFunction.__call__": "*args, **kwargs",
    "lang.ir:SglSamplingParams": (
        "max_new_tokens=128, min_new_tokens=0, n=1, stop=(), stop_token_ids=(), stop_regex=(), temperature=1.0, "
        "top_p=1.0, top_k=-1, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0, ignore_eos=False, "
        "return_logprob=None, logprob_start_len=None, top_logprobs_num=None, return_text_in_logprobs=None, "
        "json_schema=None, dtype=None, regex=None"
    ),
    "lang.ir:SglConstantText": "text, ids=None, special=True, *, where=None",
    "lang.ir:SglExprList": "expr_list",
    "lang.ir:SglRoleBegin": "role",
    "lang.ir:SglRoleEnd": "role",
    "lang.ir:SglImage": "path",
    "lang.ir:SglVarScopeBegin": "name",
    "lang.ir:SglVarScopeEnd": "name",
    "lang.ir:SglVariable": "name, source=None",
    "lang.ir:SglArgument": "name, value=None",
    "lang.ir:SglGetForkItem": "index",
    "lang.ir:SglCommitLazy": "",
    "lang.ir:SglSeparateReasoning": "model_type, expr",
    "lang.interpreter:ProgramState.system": "expr=None",
    "lang.interpreter:ProgramState.user": "expr=None",
    "lang.interpreter:ProgramState.assistant": "expr=None",
    "lang.interpreter:ProgramState.var_scope": "name",
    "lang.interpreter:ProgramState.fork": "size=1, position_ids_offset=None",
    "lang.interpreter:ProgramState.copy": "position_ids_offset=None",
    "lang.interpreter:ProgramState.text": "",
    "lang.interpreter:ProgramState.messages": "",
    "lang.interpreter:ProgramState.sync": "",
    "lang.interpreter:ProgramState.error": "",
    "lang.interpreter:ProgramState.text_iter": "var_name=None",
    "lang.interpreter:ProgramState.text_async_iter": "var_name=None, return_meta_data=False",
    "lang.interpreter:ProgramState.get_var": "name",
    "lang.interpreter:ProgramState.set_var": "name, value",
    "lang.interpreter:ProgramState.get_meta_info": "name",
    "lang.interpreter:ProgramStateGroup": "states, src_state=None",
    "lang.interpreter:ProgramStateGroup.join": "mode='gather_variable'",
    "lang.interpreter:StreamExecutor.get_meta_info": "name, timeout=None",
    "lang.chat_template:ChatTemplate": (
        "name, default_system_prompt, role_prefix_and_suffix, stop_str=(), image_token='<image>', "
        "audio_token='<audio>', style=<ChatTemplateStyle.PLAIN: 1>"
    ),
    "lang.chat_template:ChatTemplate.get_prefix_and_suffix": "role, hist_messages",
    "lang.chat_template:ChatTemplate.get_prompt": "messages",
    "lang.chat_template:register_chat_template": "template",
    "lang.chat_template:register_chat_template_matching_function": "func",
    "lang.chat_template:get_chat_template": "name",
    "lang.chat_template:get_chat_template_by_model_path": "model_path",
    "lang.choices:ChoicesDecision": "decision, meta_info=None",
    "lang.choices:ChoicesSamplingMethod.__call__": f"*, {LOGPROBS}, unconditional_token_logprobs=None",
    "lang.tracer:TracingScope": "tracer_state",
    "lang.tracer:trace_program": "program, arguments, backend",
    "lang.tracer:extract_prefix_by_tracing": "program, backend",
    "lang.backend.runtime_endpoint:RuntimeEndpoint": (
        "base_url, api_key=None, verify=None, chat_template_name=None"
    ),
    "lang.backend.runtime_endpoint:RuntimeEndpoint.start_profile": "",
    "lang.backend.runtime_endpoint:RuntimeEndpoint.stop_profile": "",
    "lang.backend.runtime_endpoint:Runtime": "log_level='error', launch_timeout=300.0, **kwargs",
    "lang.backend.runtime_endpoint:Runtime.shutdown": "",
    "lang.backend.runtime_endpoint:Runtime.cache_prefix": "prefix",
    "lang.backend.runtime_endpoint:Runtime.get_tokenizer": "",
    "lang.backend.runtime_endpoint:Runtime.async_generate": "prompt, sampling_params=None",
    "lang.backend.runtime_endpoint:Runtime.generate": (
        "prompt, sampling_params=None, return_logprob=False, logprob_start_len=None, top_logprobs_num=None, "
        "lora_path=None, session_id=None"
    ),
    "lang.backend.runtime_endpoint:Runtime.encode": "prompt",
    "lang.backend.runtime_endpoint:Runtime.get_server_info": "",
    "lang.backend.base_backend:BaseBackend": "",
    "lang.backend.base_backend:BaseBackend.get_model_name": "",
    "lang.backend.base_backend:BaseBackend.get_chat_template": "",
    "lang.backend.base_backend:BaseBackend.cache_prefix": "prefix_str",
    "lang.backend.base_backend:BaseBackend.uncache_prefix": "rid",
    "lang.backend.base_backend:BaseBackend.end_request": "rid",
    "lang.backend.base_backend:BaseBackend.begin_program": "s",
    "lang.backend.base_backend:BaseBackend.end_program": "s",
    "lang.backend.base_backend:BaseBackend.commit_lazy_operations": "s",
    "lang.backend.base_backend:BaseBackend.fork_program": "src, dst, position_ids_offset=None",
    "lang.backend.base_backend:BaseBackend.fill_image": "s",
    "lang.backend.base_backend:BaseBackend.generate": "s, sampling_params",
    "lang.backend.base_backend:BaseBackend.generate_stream": "s, sampling_params",
    "lang.backend.base_backend:BaseBackend.select": "s, choices, temperature, choices_method",
    "lang.backend.base_backend:BaseBackend.concatenate_and_append": "src_rids, dst_rid",
    "lang.backend.base_backend:BaseBackend.shutdown": "",
    "lang.backend.base_backend:BaseBackend.flush_cache": "",
    "lang.backend.base_backend:BaseBackend.get_server_info": "",
    "lang.backend.openai:OpenAI": (
        "model_name, is_chat_model=None, chat_template=None, is_azure=False, *args, **kwargs"
    ),
    "lang.backend.anthropic:Anthropic": "model_name, *args, **kwargs",
    "lang.backend.vertexai:VertexAI": "model_name, safety_settings=None",
    "lang.backend.crusoe:Crusoe": "model_name, api_key=None, base_url=None, chat_template=None, **kwargs",
    "lang.backend.litellm:LiteLLM": (
        "model_name, chat_template=None, api_key=None, organization=None, base_url=None, timeout=600, "
        "max_retries=None, default_headers=None"
    ),
    "utils:read_jsonl": "filename",
    "utils:dump_state_text": "filename, states, mode='w'",
    "utils:download_and_cache_file": "url, filename=None",
    "utils:wait_for_server": "base_url, timeout=None, process=None",
    "utils:launch_server_cmd": "command, host='0.0.0.0', port=None",
    "utils:terminate_process": "process",
    "utils:print_highlight": "html_content",
    "utils:convert_json_schema_to_str": "json_schema",
    "utils:http_request": "url, json=None, stream=False, api_key=None, verify=None, method=None",
    "utils:encode_image_base64": "image_path",
    "utils:find_printable_text": "text",
    "utils:trim_overlap": "existing_text, new_chunk",
    "utils:stream_and_merge": "llm, prompt, sampling_params",
    "utils:async_stream_and_merge": "llm, prompt, sampling_params",
    "utils:LazyImport": "module_name, class_name",
    "lang.interpreter:cache_program": "program, backend",
    "srt.constrained.outlines_backend:build_regex_from_object": "object, whitespace_pattern=None",
}

MODULES = {
    "lang.api": "function gen gen_int gen_string select image video system user assistant set_default_backend",
    "lang.backend.base_backend": "BaseBackend",
    "lang.backend.runtime_endpoint": "Runtime RuntimeEndpoint",
    "lang.chat_template": (
        "ChatTemplate ChatTemplateStyle register_chat_template register_chat_template_matching_function "
        "get_chat_template get_chat_template_by_model_path chat_template_registry matching_function_registry "
        "match_deepseek match_orion match_deepseek_janus_pro match_dbrx match_vicuna match_llama2_chat match_mistral "
        "match_llama3_instruct match_chat_ml match_chat_yi match_gemma match_openbmb_minicpm match_c4ai_command_r "
        "match_granite_instruct match_internvl_chat match_interns1_chat"
    ),
    "lang.choices": (
        "ChoicesDecision ChoicesSamplingMethod token_length_normalized greedy_token_selection "
        "unconditional_likelihood_normalized"
    ),
    "lang.global_config": "GlobalConfig global_config",
    "lang.interpreter": "ProgramState ProgramStateGroup StreamExecutor cache_program",
    "lang.backend.openai": "OpenAI TokenUsage",
    "lang.ir": (
        "REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglFunction SglGen SglSelect SglExpr SglExprList SglConstantText "
        "SglRoleBegin SglRoleEnd SglSamplingParams SglImage SglVideo SglArgument SglVariable SglFork SglGetForkItem "
        "SglVarScopeBegin SglVarScopeEnd SglConcateAndAppend SglCommitLazy SglSeparateReasoning"
    ),
    "lang.tracer": "TracerProgramState TracingScope StopTracing",
    "srt.constrained.outlines_backend": "build_regex_from_object",
    "srt.entrypoints.http_server": "launch_server",
    "srt.entrypoints.http_server_engine": "HttpServerEngineAdapter",
    "srt.server_args": "ServerArgs",
    "utils": (
        "dump_state_text read_jsonl download_and_cache_file wait_for_server launch_server_cmd terminate_process "
        "print_highlight convert_json_schema_to_str http_request encode_image_base64 find_printable_text trim_overlap "
        "stream_and_merge async_stream_and_merge LazyImport"
    ),
}


def find(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(f"sglang_lite.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


def parameters(function):
    """The parameters of a function, without self, as (name, whether given by name, default as
    text).
    """
    found = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = None if p.default is p.empty else repr(p.default)
        if p.default is sgl.token_length_normalized:
            default = "token_length_normalized"
        if p.name != "self":
            found.append((star + p.name, p.kind is p.KEYWORD_ONLY, default))
    return found


def written(text):
    """The same of a signature that is written down."""
    found, by_name = [], False
    for part in filter(None, text.split(", ")):
        name, has_default, default = part.partition("=")
        if name != "*":
            found.append(
                (name, by_name and not name.startswith("*"), default if has_default else None)
            )
        by_name = by_name or (name.startswith("*") and not name.startswith("**"))
    return found


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_signature_takes_whatever_sglang_takes(place):
    theirs = written(SIGNATURES[place])
    # which only takes more
    ours = [p for p in parameters(find(place)) if p in theirs or p[0] != "*args"]
    order = [p for p in ours if not p[1]]
    required = len([p for p in theirs if not p[1]])
    assert order[:required] == [p for p in theirs if not p[1]]
    assert {p for p in theirs if p[1]} <= set(ours)
    for name, _, default in [p for p in ours if p not in theirs and not p[0].startswith("**")]:
        assert default is not None, f"{name} is not SGLang's and has no default"


@pytest.mark.parametrize(
    "place", ["lang.ir:SglFunction.run", "lang.ir:SglFunction.run_batch", "lang.api:gen"]
)
def test_what_is_new_in_a_signature_is_given_by_name(place):
    theirs = {name for name, _, _ in written(SIGNATURES[place])}
    assert all(by_name for name, by_name, _ in parameters(find(place)) if name not in theirs)


@pytest.mark.parametrize(("sync", "twin"), [("run", "arun"), ("run_batch", "arun_batch")])
def test_the_methods_for_coroutines_are_twins(sync, twin):
    sync, twin = (getattr(ir.SglFunction, name) for name in (sync, twin))
    assert inspect.signature(sync) == inspect.signature(twin)
    assert inspect.iscoroutinefunction(twin)
    assert not inspect.iscoroutinefunction(sync)


@pytest.mark.parametrize("name", read_surface()["names"])
def test_the_package_exports_what_sglang_exports(name):
    assert name in sgl.__all__
    assert name in dir(sgl)
    assert getattr(sgl, name) is not None


@pytest.mark.parametrize("module", MODULES)
def test_modules_keep_their_paths(module):
    found = importlib.import_module(f"sglang_lite.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_a_name_means_the_same_wherever_it_is_imported_from():
    from sglang_lite.lang import api, function, interpreter, state, tracer

    assert sgl.gen is api.gen
    assert ir.SglFunction is function.SglFunction
    assert ir.SglArgument is tracer.SglArgument
    assert interpreter.ProgramState is state.ProgramState is sgl.ProgramState
    assert interpreter.ProgramStateGroup is sgl.ProgramStateGroup
    for module, name in ((ir, "SglNothing"), (interpreter, "Nothing")):
        with pytest.raises(AttributeError, match="Nothing"):
            getattr(module, name)


def test_exported_classes_are_classes():
    class Mine(sgl.Engine):
        pass

    assert not isinstance(3, sgl.Engine)
    assert isinstance(sgl.Engine, type)


# -------------------------------------------------------------------------------- what the docs say

DOCS = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_every_test_that_the_docs_name_exists():
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)::(\w+)`", DOCS.read_text())
    assert len(named) > 50
    for file, test in named:
        folder = Path(__file__).parents[2 if file.startswith("tests/") else 0]
        assert re.search(rf"^(async )?def {test}\(", (folder / file).read_text(), re.MULTILINE), (
            f"{file}::{test}"
        )


@pytest.mark.parametrize("name", read_surface()["names"])
def test_the_docs_have_every_name(name):
    text = DOCS.read_text().replace(
        "`*_begin`, `*_end`",
        "user_begin user_end system_begin system_end assistant_begin assistant_end",
    )
    aliases = {
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
        "__version__",
    }
    assert name in aliases or re.search(rf"\b{name}\b", text)
