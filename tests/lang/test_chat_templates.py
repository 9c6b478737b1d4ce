"""The registry of chat templates: SGLang's 27 names, and no silent default."""

import json
import subprocess
import sys
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang import chat_template as registry
from sglang_lite.lang.chat_template import (
    ChatTemplate,
    ChatTemplateStyle,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
    register_chat_template_matching_function,
)
from sglang_lite.protocol import UNSET

# One conversation of three turns, and what the model is prompted with after it.
CONVERSATION = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]

CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA3 = (
    "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
DEEPSEEK = "S<｜User｜>U<｜Assistant｜>A<｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>"
MINICPM = "S user:U assistant:A</s>user:V assistant:"
RENDERED = {
    "default": "SYSTEM:S\nUSER:U\nASSISTANT:A\nUSER:V\nASSISTANT:",
    "claude": "S\n\nHuman: U\n\nAssistant:A\n\nHuman: V\n\nAssistant:",
    "chatml": CHATML,
    "chatml-llava": CHATML,
    "qwen": CHATML,
    "qwen2-vl": CHATML,
    "internvl-2-5": CHATML,
    "interns1": CHATML,
    "vicuna_v1.1": "S USER:U ASSISTANT:A</s>USER:V ASSISTANT:",
    "llama-2-chat": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]A </s><s>[INST] V [/INST]",
    "mistral": "[SYSTEM_PROMPT] S [/SYSTEM_PROMPT][INST] U [/INST]A </s><s>[INST] V [/INST]",
    "llama-3-instruct": LLAMA3,
    "llama-3-instruct-llava": LLAMA3,
    "llama-4": LLAMA3.replace("start_header_id", "header_start")
    .replace("end_header_id", "header_end")
    .replace("eot_id", "eot"),
    "minicpmv": MINICPM,
    "minicpmo": MINICPM,
    "janus": DEEPSEEK,
    "janus-pro": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "yi-1.5": "S<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "yi-vl": "S\n\n### Human:U\n### Assistant:A\n### Human:V\n### Assistant:",
    "gemma-it": "S<start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "gemma-4-it": "<|turn>system\nS<turn|>\n<|turn>user\nU<turn|>\n<|turn>model\nA<turn|>\n"
    "<|turn>user\nV<turn|>\n<|turn>model\n",
    "dbrx-instruct": CHATML.replace("<|im_end|>\n", "<|im_end|>").replace(
        "<|im_end|><", "<|im_end|>\n<"
    ),
    "c4ai-command-r": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>V<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "granite-3-instruct": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "glm-4v": "<|system|>\nS\n<|user|>\nU\n<|assistant|>\nA\n<|user|>\nV\n<|assistant|>\n",
}
DEFAULT_SYSTEM = {
    "chatml-llava": "You are a helpful assistant.",
    "qwen": "You are a helpful assistant.",
    "qwen2-vl": "You are a helpful assistant.",
    "vicuna_v1.1": "A chat between a curious user and an artificial intelligence assistant.",
    "yi-vl": "This is a chat between an inquisitive human and an AI assistant.",
    "dbrx-instruct": "You are DBRX, created by Databricks.",
    "internvl-2-5": "你是书生·万象",
    "interns1": "You are an AI assistant whose name is Intern-S1 (书生大模型).",
}
STOPS = {
    "chatml": ("<|im_end|>",),
    "chatml-llava": ("<|im_end|>",),
    "qwen": ("<|im_end|>",),
    "qwen2-vl": ("<|im_end|>",),
    "dbrx-instruct": ("<|im_end|>",),
    "yi-1.5": ("<|im_end|>",),
    "internvl-2-5": ("<|im_end|>", "<|action_end|>"),
    "interns1": ("<|im_end|>", "<|action_end|>"),
    "mistral": ("</s>",),
    "llama-3-instruct": ("<|eot_id|>",),
    "llama-3-instruct-llava": ("<|eot_id|>",),
    "llama-4": ("<|eot|>",),
    "minicpmv": ("<|im_end|>", "<|endoftext|>"),
    "minicpmo": ("<|im_end|>", "<|endoftext|>"),
    "janus": ("<｜end▁of▁sentence｜>",),
    "janus-pro": ("<｜end▁of▁sentence｜>",),
    "deepseek-v3": ("<｜end▁of▁sentence｜>",),
    "granite-3-instruct": ("<|end_of_text|>",),
    "glm-4v": ("<|user|>", "<|endoftext|>", "<|observation|>"),
}
IMAGES = {
    "chatml-llava": "<image>\n", "qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "vicuna_v1.1": " <image>\n", "mistral": "[IMG]", "llama-3-instruct": "<|image|>",
    "llama-3-instruct-llava": "<image>\n", "llama-4": "<|image|>", "minicpmv": "(<image>./</image>)",
    "minicpmo": "(<image>./</image>)", "janus": "<image_placeholder>\n", "janus-pro": "<image_placeholder>\n",
    "yi-vl": " <image_placeholder>\n", "gemma-it": "<start_of_image>", "glm-4v": "<|image|>",
}  # fmt: skip


class Named(sgl.ScriptedBackend):
    """A scripted backend with a template of the registry."""

    def __init__(self, name, **options):
        super().__init__(**options)
        self.chat_template = get_chat_template(name)


def said(name, turns):
    """The text of a program that has these turns and asks for an answer."""

    @sgl.function
    def program(s):
        for role, text in turns:
            s += getattr(sgl, role)(text)
        s += sgl.assistant_begin()

    return program.run(backend=Named(name)).text()


def test_there_are_sglangs_27_names():
    assert set(registry.chat_template_registry) == set(RENDERED)
    assert len(RENDERED) == 27


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_is_written_as_the_model_learned_it(name):
    assert said(name, CONVERSATION) == RENDERED[name]


@pytest.mark.parametrize("name", RENDERED)
def test_get_prompt_writes_the_same(name):
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    template = get_chat_template(name)
    assert template.name == name
    prefix, _ = template.get_prefix_and_suffix("assistant", messages)
    assert template.get_prompt(messages) + prefix == RENDERED[name]


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_without_a_system_turn_gets_the_templates_own(name):
    text = said(name, [("user", "U")])
    template = get_chat_template(name)
    if name in DEFAULT_SYSTEM:
        assert template.default_system_prompt.startswith(DEFAULT_SYSTEM[name])
        assert text == said(name, [("system", template.default_system_prompt), ("user", "U")])
    else:
        assert template.default_system_prompt is None
        assert "system" not in text


@pytest.mark.parametrize("name", RENDERED)
def test_stops_and_placeholders_are_the_models(name):
    template = get_chat_template(name)
    assert tuple(template.stop_str) == STOPS.get(name, ())
    assert template.image_token == IMAGES.get(name, "<image>")
    assert template.audio_token == {
        "minicpmo": "(<audio>./</audio>)",
        "gemma-it": "<start_of_audio>",
    }.get(name, "<audio>")


def test_the_stops_of_the_template_end_an_assistant_turn_and_no_other_text():
    @sgl.function
    def program(s):
        s += sgl.gen("before")
        s += sgl.assistant(sgl.gen("in", stop="\n"))

    script = Named("internvl-2-5", default="x")
    program.run(backend=script).sync()
    before, inside = (call.params.stop for call in script.calls)
    assert inside == ("\n", "<|im_end|>", "<|action_end|>")
    assert before is UNSET


@pytest.mark.parametrize(
    ("name", "official"),
    [
        ("chatml", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"),
        ("llama-3-instruct", "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
         "{{ m.content | trim }}<|eot_id|>{% endfor %}"
         "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"),
        ("c4ai-command-r", "{% for m in messages %}<|START_OF_TURN_TOKEN|>"
         "<|{{ {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] }}_TOKEN|>{{ m.content }}"
         "<|END_OF_TURN_TOKEN|>{% endfor %}"
         "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"),
        ("deepseek-v3", "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
         "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
         "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"),
        ("gemma-4-it", "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
         "{{ m.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"),
        ("granite-3-instruct", "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
         "<|end_of_text|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"),
    ],
)  # fmt: skip
def test_a_template_equals_the_jinja_of_such_models(name, official):
    """(Written down here from the models' formats, without the marks that the tokenizer adds at the
    beginning.)
    """
    from sglang_lite.text.chat_template import JinjaTemplate

    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    # jinja2 drops one line end behind a tag, as transformers has it too, so they are written as
    # values.
    source = official.replace("\n", "{{ '\\n' }}")
    assert JinjaTemplate(source).render(messages, add_generation_prompt=True) == RENDERED[name]


def test_llama_2_puts_the_system_turn_into_the_first_user_turn_alone():
    assert said("llama-2-chat", [("user", "U")]) == "[INST] U [/INST]"
    text = said("llama-2-chat", [("user", "U"), ("assistant", "A"), ("system", "S"), ("user", "V")])
    assert text == "[INST] U [/INST]A </s><s><<SYS>>\nS\n<</SYS>>\n\n[INST] V [/INST]"


def test_a_system_message_without_content_gets_the_default():
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": None},
        {"role": "user", "content": "U"},
    ]
    assert get_chat_template("default").get_prompt(messages) == "USER:U\n"
    assert (
        get_chat_template("qwen")
        .get_prompt(messages)
        .startswith("<|im_start|>system\nYou are a helpful")
    )


def test_an_unknown_role_is_refused():
    with pytest.raises(
        sgl.TemplateError, match="'chatml' has no role 'tool'; it has: system, user, assistant"
    ):
        get_chat_template("chatml").get_prefix_and_suffix("tool", [])


# ------------------------------------------------------------------------------------- choosing one

KNOWN = {
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-chat",
    "codellama/CodeLlama-7b-Instruct-hf": "llama-2-chat",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-instruct",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3-instruct",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistral",
    "mistralai/Pixtral-12B-2409": "mistral",
    "Qwen/Qwen1.5-7B-Chat": "qwen",
    "Qwen/Qwen2.5-7B-Instruct": "qwen",
    "Qwen/Qwen3-8B": "qwen",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2-vl",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-v3",
    "deepseek-ai/Janus-Pro-7B": "janus-pro",
    "lmsys/vicuna-7b-v1.5": "vicuna_v1.1",
    "liuhaotian/llava-v1.5-7b": "vicuna_v1.1",
    "liuhaotian/llava-v1.6-34b": "chatml-llava",
    "lmms-lab/llava-onevision-qwen2-7b-ov": "chatml-llava",
    "google/gemma-2-2b-it": "gemma-it",
    "google/gemma-4-E4B-it": "gemma-4-it",
    "01-ai/Yi-1.5-9B-Chat": "yi-1.5",
    "01-ai/Yi-VL-6B": "yi-vl",
    "databricks/dbrx-instruct": "dbrx-instruct",
    "CohereForAI/c4ai-command-r-v01": "c4ai-command-r",
    "ibm-granite/granite-3.1-8b-instruct": "granite-3-instruct",
    "OpenGVLab/InternVL2_5-8B": "internvl-2-5",
    "internlm/Intern-S1": "interns1",
    "openbmb/MiniCPM-V-2_6": "minicpmv",
    "openbmb/MiniCPM-o-2_6": "minicpmo",
    "THUDM/glm-4v-9b": "glm-4v",
    "zai-org/GLM-4.1V-9B-Thinking": "glm-4v",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "chatml",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "chatml",
    "OrionStarAI/Orion-14B-Chat": "claude",
}
UNKNOWN = (
    "openai/gpt-oss-20b", "microsoft/Phi-4", "zai-org/GLM-4.5", "moonshotai/Kimi-K2-Instruct", "gpt-4o",
    "/data/my-model", "", "meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B-Base", "deepseek-ai/DeepSeek-V3-Base", "google/gemma-3-1b-pt",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "HuggingFaceTB/SmolLM2-135M",
)  # fmt: skip


@pytest.mark.parametrize("path", KNOWN)
def test_a_model_is_known_by_its_path(path):
    assert get_chat_template_by_model_path(path).name == KNOWN[path]
    assert get_chat_template_by_model_path(path.lower()).name == KNOWN[path]


@pytest.mark.parametrize("path", UNKNOWN)
def test_for_an_unknown_or_base_model_there_is_no_silent_default(path):
    with pytest.raises(
        sgl.TemplateError, match="no chat template is known for the model"
    ) as caught:
        get_chat_template_by_model_path(path)
    assert repr(path) in str(caught.value)
    assert "register_chat_template" in caught.value.hint


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(sgl.TemplateError, match="no chat template 'chatlm'") as caught:
        get_chat_template("chatlm")
    assert "chatml, " in caught.value.hint


@pytest.fixture
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "chat_template_registry", dict(registry.chat_template_registry))
    monkeypatch.setattr(
        registry, "matching_function_registry", list(registry.matching_function_registry)
    )


@pytest.mark.usefixtures("_own_registry")
def test_templates_and_matching_functions_can_be_added():
    mine = ChatTemplate(
        "mine", None, {"user": ("<u>", "</u>"), "assistant": ("<a>", "</a>")}, ["</a>"]
    )
    assert mine.style is ChatTemplateStyle.PLAIN
    register_chat_template(mine)
    assert get_chat_template("mine") is mine
    assert said("mine", [("user", "U")]) == "<u>U</u><a>"

    @register_chat_template_matching_function
    def match(model_path):
        return "mine" if "my-model" in model_path else None

    assert match("my-model") == "mine"
    assert get_chat_template_by_model_path("/data/my-model") is mine
    with pytest.raises(sgl.TemplateError):
        get_chat_template_by_model_path("/data/other")


@pytest.mark.usefixtures("_own_registry")
def test_a_template_can_be_replaced():
    register_chat_template(ChatTemplate("chatml", None, {"user": ("u", "")}))
    assert get_chat_template("chatml").role_prefix_and_suffix == {"user": ("u", "")}


def test_the_registry_needs_no_model_library():
    code = (
        "import sys, json; from sglang_lite.lang.chat_template import get_chat_template_by_model_path as f; "
        "f('Qwen/Qwen3-8B'); print(json.dumps([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(found) == []
