"""Registry of chat templates, under SGLang's names, for models that come without one.

A model's own template has priority (text/chat_template.py). A template of this registry is used
only if it is requested by name or if a matching function recognises the model's path. An unknown
model is an error and never falls back to "default".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib import resources

from sglang_lite.protocol import TemplateError
from sglang_lite.protocol.anything import Json


class ChatTemplateStyle(Enum):
    """Layout of a template. PLAIN: every turn of a role is wrapped in the same text. LLAMA2: a
    leading system turn is written inside the first user turn.
    """

    PLAIN = auto()
    LLAMA2 = auto()


@dataclass
class ChatTemplate:
    """Chat template that puts fixed text around the turns of each role.

    Attributes:
        name: name in the registry.
        default_system_prompt: system turn of a conversation that starts with another role, or None
            for no such turn.
        role_prefix_and_suffix: text before and after the turns of each role.
        stop_str: strings that end an assistant turn, in addition to the model's end-of-sequence
            token.
        image_token, audio_token: placeholders of an image and of a sound in the text.
        style: layout of the first turns.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: Sequence[str] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = ChatTemplateStyle.PLAIN

    def get_prefix_and_suffix(
        self, role: str, hist_messages: Sequence[Mapping[str, Json]]
    ) -> tuple[str, str]:
        """Returns the text before and after a turn of `role` that follows `hist_messages`.

        Raises:
            TemplateError: the template does not define the role.
        """
        turns = self.role_prefix_and_suffix
        if role not in turns:
            raise TemplateError(
                f"the chat template {self.name!r} has no role {role!r}; it has: {', '.join(turns)}."
            )
        prefix, suffix = turns[role]
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                return turns["user"][0] + prefix, suffix
            if role == "user" and [m["role"] for m in hist_messages] == ["system"]:
                return "", suffix
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Mapping[str, Json]]) -> str:
        """Returns the text of a whole conversation. A system message whose content is None gets the
        default system prompt. It is left out if the template has no default.
        """
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
    """Registers a template under its name."""
    chat_template_registry[template.name] = template


def register_chat_template_matching_function(
    func: Callable[[str], str | None],
) -> Callable[[str], str | None]:
    """Registers a function that maps a model's path to the name of a template, or to None if it
    does not know the model. Returns the function, so it can be used as a decorator.
    """
    matching_function_registry.append(func)
    return func


def get_chat_template(name: str) -> ChatTemplate:
    """Returns the template registered under a name.

    Raises:
        TemplateError: no template has this name.
    """
    if name not in chat_template_registry:
        raise TemplateError(
            f"there is no chat template {name!r}.",
            hint=f"Known: {', '.join(sorted(chat_template_registry))}.",
        )
    return chat_template_registry[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """Returns the template for a model's path or name, as chosen by the first matching function
    that recognises it.

    Raises:
        TemplateError: no matching function recognises the model.
    """
    for matching in matching_function_registry:
        name = matching(model_path)
        if name is not None:
            return get_chat_template(name)
    raise TemplateError(
        f"no chat template is known for the model {model_path!r}.",
        hint="Choose one: get_chat_template(name), register_chat_template(…), or the model's own Jinja template.",
    )


def _register_bundled_templates() -> None:
    """Registers the templates of chat_templates.toml."""
    text = resources.files("sglang_lite.lang").joinpath("chat_templates.toml").read_text("utf-8")
    for name, fields in tomllib.loads(text).items():
        turns = {role: (prefix, suffix) for role, (prefix, suffix) in fields.pop("turns").items()}
        style = ChatTemplateStyle[fields.pop("style", "PLAIN")]
        stops = tuple(fields.pop("stop_str", ()))
        system = fields.pop("default_system_prompt", None)
        register_chat_template(ChatTemplate(name, system, turns, stops, style=style, **fields))


_register_bundled_templates()


def _register_matcher(*rows: tuple[str, str, str | None]) -> Callable[[str], str | None]:
    """Registers and returns a function that maps a model's path to the name of a template.

    Args:
        rows: name of a template, a pattern that must occur in the path, and one that must not
            (or None). Case is ignored, and the first row that fits is used.
    """

    def match(model_path: str) -> str | None:
        for name, pattern, excluded in rows:
            if re.search(pattern, model_path, re.IGNORECASE) and not (
                excluded and re.search(excluded, model_path, re.IGNORECASE)
            ):
                return name
        return None

    return register_chat_template_matching_function(match)


# Matching functions under SGLang's names, in the order in which they are tried.
match_deepseek = _register_matcher(("deepseek-v3", r"deepseek-(v3|r1)", r"base"))
match_orion = _register_matcher(("claude", r"orion", None))
match_deepseek_janus_pro = _register_matcher(("janus-pro", r"janus", None))
match_dbrx = _register_matcher(("dbrx-instruct", r"dbrx.*instruct", None))
match_vicuna = _register_matcher(("vicuna_v1.1", r"vicuna|llava-v1\.5|llava-next-video-7b", None))
match_llama2_chat = _register_matcher(("llama-2-chat", r"llama-2.*chat|codellama.*instruct", None))
match_mistral = _register_matcher(("mistral", r"pixtral|(mistral|mixtral).*instruct", None))
match_llama4_instruct = _register_matcher(("llama-4", r"llama-4.*instruct", None))  # not in SGLang
match_llama3_instruct = _register_matcher(("llama-3-instruct", r"llama-3.*instruct", None))
match_chat_ml = _register_matcher(
    ("chatml", r"tinyllama.*chat|smollm.*instruct", None),
    ("qwen2-vl", r"qwen.*vl", None),
    ("glm-4v", r"glm[-_]?4(\.\d+)?v", None),
    (
        "chatml-llava",
        r"llava-v1\.6-34b|llava-v1\.6-yi-34b|llava-next-video-34b|llava-onevision-qwen2",
        None,
    ),
    ("qwen", r"qwen.*(chat|instruct)|qwen3", r"llava|base"),
)
match_chat_yi = _register_matcher(("yi-vl", r"yi-vl", r"llava"), ("yi-1.5", r"yi-1\.5.*chat", None))
match_gemma = _register_matcher(
    ("gemma-4-it", r"gemma-4.*it", None), ("gemma-it", r"gemma.*-it", None)
)
match_openbmb_minicpm = _register_matcher(
    ("minicpmv", r"minicpm-v", None), ("minicpmo", r"minicpm-o", None)
)
match_c4ai_command_r = _register_matcher(("c4ai-command-r", r"c4ai-command-r", None))
match_granite_instruct = _register_matcher(("granite-3-instruct", r"granite.*instruct", None))
match_internvl_chat = _register_matcher(("internvl-2-5", r"internvl2_5", None))
match_interns1_chat = _register_matcher(("interns1", r"intern-?s1", None))
