"""Chat templates by name, for models that bring none: SGLang's registry, with its names.

A model's own template comes first (text/chat_template.py). What is here is asked only by name, or for a model whose
path one of the matching functions knows; an unknown model is an error, never "default".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang_lite.protocol import TemplateError
from sglang_lite.protocol.anything import Json


class ChatTemplateStyle(Enum):
    """PLAIN: the same text around every turn of a role. LLAMA2: a leading system turn goes into the first user turn."""

    PLAIN = auto()
    LLAMA2 = auto()


@dataclass
class ChatTemplate:
    """A template that puts fixed text around the turns of each role.

    Attributes:
        default_system_prompt: put first into a conversation that starts with another role; None for none.
        role_prefix_and_suffix: role to the text before and after its turns.
        stop_str: what ends an assistant turn beside the model's own end token.
        image_token, audio_token: what stands in the text for an image or a sound.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: Sequence[str] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Mapping[str, Json]]) -> tuple[str, str]:
        """The text around a turn of `role` that follows `hist_messages`.

        Raises:
            TemplateError: the template has no such role.
        """
        turns = self.role_prefix_and_suffix
        if role not in turns:
            raise TemplateError(f"the chat template {self.name!r} has no role {role!r}; it has: {', '.join(turns)}.")
        prefix, suffix = turns[role]
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                return turns["user"][0] + prefix, suffix
            if role == "user" and [m["role"] for m in hist_messages] == ["system"]:
                return "", suffix
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Mapping[str, Json]]) -> str:
        """A whole conversation. A system message with content None gets the default system prompt."""
        prompt = ""
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(message["role"], messages[:i])
            prompt += f"{prefix}{content}{suffix}"
        return prompt


chat_template_registry: dict[str, ChatTemplate] = {}
matching_function_registry: list[Callable[[str], str | None]] = []


def register_chat_template(template: ChatTemplate) -> None:
    """Makes a template known by its name."""
    chat_template_registry[template.name] = template


def register_chat_template_matching_function(func: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Makes known a function from a model's path to a template's name (None: not mine). Also a decorator."""
    matching_function_registry.append(func)
    return func


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name.

    Raises:
        TemplateError: there is none.
    """
    if name not in chat_template_registry:
        raise TemplateError(
            f"no chat template {name!r}.", hint=f"There are: {', '.join(sorted(chat_template_registry))}."
        )
    return chat_template_registry[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template for a model, by its path or name.

    Raises:
        TemplateError: no matching function knows it.
    """
    for matching in matching_function_registry:
        name = matching(model_path)
        if name is not None:
            return get_chat_template(name)
    raise TemplateError(
        f"no chat template is known for the model {model_path!r}.",
        hint="Choose one: get_chat_template(name), register_chat_template(…), or the model's own Jinja template.",
    )


def _around(
    prefix: str, suffix: str, roles: Sequence[str] = ("system", "user", "assistant")
) -> dict[str, tuple[str, str]]:
    return {role: (prefix.format(role), suffix) for role in roles}


def _turns(system: tuple[str, str], user: tuple[str, str], assistant: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {"system": system, "user": user, "assistant": assistant}


_CHATML = _around("<|im_start|>{}\n", "<|im_end|>\n")
_LLAMA3 = _around("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")
_DEEPSEEK = _turns(("", ""), ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"))
_MINICPM = _turns(("", " "), ("user:", " "), ("assistant:", "</s>"))
_HELPFUL = "You are a helpful assistant."
_IM_END = ("<|im_end|>",)

for _template in (
    ChatTemplate("default", None, _turns(("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n"))),
    ChatTemplate("claude", None, _turns(("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant:", ""))),
    ChatTemplate("chatml", None, _CHATML, _IM_END),
    ChatTemplate("chatml-llava", _HELPFUL, _CHATML, _IM_END, "<image>\n"),
    ChatTemplate("qwen", _HELPFUL, _CHATML, _IM_END),
    ChatTemplate("qwen2-vl", _HELPFUL, _CHATML, _IM_END, "<|vision_start|><|image_pad|><|vision_end|>"),
    ChatTemplate(
        "vicuna_v1.1",
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions.",
        _turns(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>")),
        image_token=" <image>\n",
    ),
    ChatTemplate(
        "llama-2-chat",
        None,
        _turns(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
        style=ChatTemplateStyle.LLAMA2,
    ),
    ChatTemplate(
        "mistral",
        None,
        _turns(("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
        ("</s>",),
        "[IMG]",
    ),
    ChatTemplate("llama-3-instruct", None, _LLAMA3, ("<|eot_id|>",), "<|image|>"),
    ChatTemplate("llama-3-instruct-llava", None, _LLAMA3, ("<|eot_id|>",), "<image>\n"),
    ChatTemplate(
        "llama-4", None, _around("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"), ("<|eot|>",), "<|image|>"
    ),
    ChatTemplate("minicpmv", None, _MINICPM, ("<|im_end|>", "<|endoftext|>"), "(<image>./</image>)"),
    ChatTemplate(
        "minicpmo", None, _MINICPM, ("<|im_end|>", "<|endoftext|>"), "(<image>./</image>)", "(<audio>./</audio>)"
    ),
    ChatTemplate("janus-pro", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",), "<image_placeholder>\n"),
    ChatTemplate("janus", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",), "<image_placeholder>\n"),
    ChatTemplate("deepseek-v3", None, _DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
    ChatTemplate(
        "yi-1.5",
        None,
        _turns(("", ""), ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"), ("", "<|im_end|>\n")),
        _IM_END,
    ),
    ChatTemplate(
        "yi-vl",
        "This is a chat between an inquisitive human and an AI assistant. Assume the role of the AI assistant. Read "
        "all the images carefully, and respond to the human's questions with informative, helpful, detailed and polite "
        "answers.这是一个好奇的人类和一个人工智能助手之间的对话。假设你扮演这个AI助手的角色。"
        "仔细阅读所有的图像，并对人类的问题做出信息丰富、有帮助、详细的和礼貌的回答。",
        _turns(("", "\n\n"), ("### Human:", "\n"), ("### Assistant:", "\n")),
        image_token=" <image_placeholder>\n",
    ),
    ChatTemplate(
        "gemma-it",
        None,
        _turns(("", ""), ("<start_of_turn>user\n", "<end_of_turn>\n"), ("<start_of_turn>model\n", "<end_of_turn>\n")),
        (),
        "<start_of_image>",
        "<start_of_audio>",
    ),
    ChatTemplate(
        "gemma-4-it",
        None,
        _turns(("<|turn>system\n", "<turn|>\n"), ("<|turn>user\n", "<turn|>\n"), ("<|turn>model\n", "<turn|>\n")),
    ),
    ChatTemplate(
        "dbrx-instruct",
        "You are DBRX, created by Databricks. You were last updated in December 2023. You answer questions based on "
        "information available up to that point.\nYOU PROVIDE SHORT RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but "
        "provide thorough responses to more complex and open-ended questions.\nYou assist with various tasks, from "
        "writing to coding (using markdown for code blocks — remember to use ``` with code, JSON, and tables).\n(You "
        "do not have real-time data access or code execution capabilities. You avoid stereotyping and provide balanced "
        "perspectives on controversial topics. You do not provide song lyrics, poems, or news articles and do not "
        "divulge details of your training data.)\nThis is your system prompt, guiding your responses. Do not reference "
        "it, just respond to the user. If you find yourself talking about this message, stop. You should be responding "
        "appropriately and usually that means not mentioning this.\nYOU DO NOT MENTION ANY OF THIS INFORMATION ABOUT "
        "YOURSELF UNLESS THE INFORMATION IS DIRECTLY PERTINENT TO THE USER'S QUERY.",
        _turns(
            ("<|im_start|>system\n", "<|im_end|>"),
            ("\n<|im_start|>user\n", "<|im_end|>"),
            ("\n<|im_start|>assistant\n", "<|im_end|>"),
        ),
        _IM_END,
    ),
    ChatTemplate(
        "c4ai-command-r",
        None,
        _turns(
            ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ),
    ),
    ChatTemplate(
        "internvl-2-5",
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        _CHATML,
        ("<|im_end|>", "<|action_end|>"),
    ),
    ChatTemplate(
        "interns1",
        "You are an AI assistant whose name is Intern-S1 (书生大模型).\n- Intern-S1 (书生大模型) is a vision-language "
        "model that is developed by Shanghai AI Laboratory (上海人工智能实验室).  It is designed to be helpful, "
        "honest, and harmless.\n- Intern-S1 (书生大模型) can understand and communicate fluently in the language "
        "chosen by the user such as English and 中文.\nYou are an expert reasoner with extensive experience in all "
        "areas. You approach problems through systematic thinking and rigorous reasoning. Your response should reflect "
        "deep understanding and precise logical thinking, making your solution path and reasoning clear to others. "
        "Please put your thinking process within <think>...</think> tags.",
        _CHATML,
        ("<|im_end|>", "<|action_end|>"),
    ),
    ChatTemplate(
        "granite-3-instruct",
        None,
        _around("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|end_of_text|>",),
    ),
    ChatTemplate(
        "glm-4v", None, _around("<|{}|>\n", "\n"), ("<|user|>", "<|endoftext|>", "<|observation|>"), "<|image|>"
    ),
):
    register_chat_template(_template)


def _matching(*rows: tuple[str, str, str | None]) -> Callable[[str], str | None]:
    """A registered function from a model's path to a template's name.

    Args:
        rows: a template's name, what a path must match, what it must not; the first that fits counts.
    """

    def match(model_path: str) -> str | None:
        for name, wanted, unwanted in rows:
            if re.search(wanted, model_path, re.IGNORECASE) and not (
                unwanted and re.search(unwanted, model_path, re.IGNORECASE)
            ):
                return name
        return None

    return register_chat_template_matching_function(match)


# By SGLang's names, in the order in which they are asked.
match_deepseek = _matching(("deepseek-v3", r"deepseek-(v3|r1)", r"base"))
match_orion = _matching(("claude", r"orion", None))
match_deepseek_janus_pro = _matching(("janus-pro", r"janus", None))
match_dbrx = _matching(("dbrx-instruct", r"dbrx.*instruct", None))
match_vicuna = _matching(("vicuna_v1.1", r"vicuna|llava-v1\.5|llava-next-video-7b", None))
match_llama2_chat = _matching(("llama-2-chat", r"llama-2.*chat|codellama.*instruct", None))
match_mistral = _matching(("mistral", r"pixtral|(mistral|mixtral).*instruct", None))
match_llama4_instruct = _matching(("llama-4", r"llama-4.*instruct", None))  # the one that SGLang lacks
match_llama3_instruct = _matching(("llama-3-instruct", r"llama-3.*instruct", None))
match_chat_ml = _matching(
    ("chatml", r"tinyllama.*chat|smollm.*instruct", None),
    ("qwen2-vl", r"qwen.*vl", None),
    ("glm-4v", r"glm[-_]?4(\.\d+)?v", None),
    ("chatml-llava", r"llava-v1\.6-34b|llava-v1\.6-yi-34b|llava-next-video-34b|llava-onevision-qwen2", None),
    ("qwen", r"qwen.*(chat|instruct)|qwen3", r"llava|base"),
)
match_chat_yi = _matching(("yi-vl", r"yi-vl", r"llava"), ("yi-1.5", r"yi-1\.5.*chat", None))
match_gemma = _matching(("gemma-4-it", r"gemma-4.*it", None), ("gemma-it", r"gemma.*-it", None))
match_openbmb_minicpm = _matching(("minicpmv", r"minicpm-v", None), ("minicpmo", r"minicpm-o", None))
match_c4ai_command_r = _matching(("c4ai-command-r", r"c4ai-command-r", None))
match_granite_instruct = _matching(("granite-3-instruct", r"granite.*instruct", None))
match_internvl_chat = _matching(("internvl-2-5", r"internvl2_5", None))
match_interns1_chat = _matching(("interns1", r"intern-?s1", None))
