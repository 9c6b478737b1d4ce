"""Formats of tool calls by model family. tool_calls.py enforces them and parses calls.

Sources: the models' chat templates; `builtin_structural_tag` in xgrammar 0.2.8; mistral-common for
Mistral's formats; OpenAI's description of Harmony for gpt-oss; SGLang's descriptions of `step3`,
`dots`, `spark25` and `poolside_v1`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from sglang_lite.protocol import Notation, ParameterError, Tags


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of tool calls. A call consists of `begin`, the name of the tool, `middle`, its
    arguments, and `end`. A # in these texts stands for a number, and {name} in `begin` for the name
    of the tool.

    Attributes:
        trigger: text that begins calls and occurs nowhere else in an answer.
        opening, closing: text before and after all calls.
        separator: text between two calls.
        arguments: tags around each argument, notation of the arguments, or None if they are a JSON
            object.
        variants: other (begin, middle) pairs that models write.
        marks: marks around text that are not part of the text.
        text: marks around text that precedes calls.
        final: marks around text without calls.
        excluded: strings that this text must not contain.
        by_name: whether calls are recognised by the name of a tool, because `trigger` also occurs
            in other text.
        between: text between reasoning and answer, or None for the model's reasoning marks.
        bare: text before and after the name in calls that are JSON objects without marks
            (bare_calls.py), or None if such objects are not calls. A blank matches any blanks.
    """

    trigger: str
    begin: str
    middle: str
    end: str
    opening: str = ""
    closing: str = ""
    separator: str = ""
    arguments: Tags | Notation | None = None
    variants: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    text: tuple[str, str] = ("", "")
    final: tuple[str, str] = ("", "")
    excluded: tuple[str, ...] = ()
    by_name: bool = False
    between: str | None = None
    bare: tuple[str, str] | None = None

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts that begin calls: `trigger`, and the beginnings of variants that lack it."""
        variants = (begin for begin, _ in self.variants if not begin.startswith(self.trigger))
        return tuple(dict.fromkeys((self.trigger, *variants)))

    @property
    def accepts_any_whitespace(self) -> bool:
        """True if models may write any whitespace between the parts of a call."""
        return self.arguments is not None or bool(self.variants)

    @property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """Texts before and after a tool's name, as (begin, middle) pairs. The format's own pair
        comes first.
        """
        return (self.begin, self.middle), *self.variants


_PYTHON = Notation("=", words=("None", "False", "True"))
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_MINIMAX_M3 = "]<]minimax[>["
_HARMONY = "<|channel|>commentary to=functions."
_HARMONY_MARKS = (
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|start|>assistant",
    "<|end|>",
)


def _build_dsml_format(calls: str, blank: str = "", mark: str = "｜DSML｜") -> ToolFormat:
    """Returns the format of DeepSeek's models since V3.2, or a format that differs from it only in
    the arguments of this function.
    """
    opening = f"<{mark}{calls}>\n"
    closing = f"</{mark}{calls}>"
    end = f"</{mark}{blank}parameter>"
    types = ("false", "false", "false", "true", "false", "false")
    tags = Tags(
        f'<{mark}{blank}parameter name="{{name}}" string="{{type}}">', end + "\n", end, types
    )
    return ToolFormat(
        opening[:-1],
        f'<{mark}{blank}invoke name="',
        '">\n',
        f"</{mark}{blank}invoke>\n",
        opening=opening,
        closing=closing,
        arguments=tags,
    )


def _build_hunyuan_format(suffix: str) -> ToolFormat:
    """Returns the format of Hunyuan's models, whose marks end with a suffix of the checkpoint."""
    end = f"</arg_value{suffix}>"
    return ToolFormat(
        f"<tool_calls{suffix}>",
        f"<tool_call{suffix}>",
        f"<tool_sep{suffix}>\n",
        f"</tool_call{suffix}>\n",
        opening=f"<tool_calls{suffix}>\n",
        closing=f"</tool_calls{suffix}>",
        arguments=Tags(
            f"<arg_key{suffix}>{{name}}</arg_key{suffix}>\n<arg_value{suffix}>", end + "\n", end
        ),
    )


# Formats by SGLang's names for them. SGLang lacks "cohere", which is xgrammar's name. Some rows are
# variants of a format that SGLang tells apart by the model.
FORMATS = {
    "qwen": ToolFormat(
        "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n",
        bare=('{ "name" : "', '" , "arguments" :'),
    ),
    "exaone": ToolFormat("<tool_call>", '<tool_call>{"name": "', '", "arguments": ', "}</tool_call>", separator="\n"),
    "llama3": ToolFormat('{"name": "', '{"name": "', '", "parameters": ', "}", separator="; "),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS] [", closing="]", separator=", "
    ),
    "mistral-nemo": ToolFormat(
        "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS][", closing="]", separator=", "
    ),
    "mistral-v13": ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    "deepseekv3": ToolFormat(
        _DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        opening=_DEEPSEEK, closing="<｜tool▁calls▁end｜>", separator="\n",
    ),
    "deepseekv31": ToolFormat(
        _DEEPSEEK, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        opening=_DEEPSEEK, closing="<｜tool▁calls▁end｜>",
    ),
    "deepseekv32": _build_dsml_format("function_calls"),
    "deepseekv4": _build_dsml_format("tool_calls"),
    "deepseekv41": _build_dsml_format(" calls", " "),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", ":#<|tool_call_argument_begin|>",
        "<|tool_call_end|>", opening="<|tool_calls_section_begin|>", closing="<|tool_calls_section_end|>",
    ),
    "kimi_k3": ToolFormat(
        "<|open|>tools<|sep|>", '<|open|>call tool="', '" index="#"<|sep|>', "<|close|>call<|sep|>",
        opening="<|open|>tools<|sep|>", closing="<|close|>tools<|sep|><|close|>message<|sep|>",
        arguments=Tags(
            '<|open|>argument key="{name}" type="{type}"<|sep|>', "<|close|>argument<|sep|>", "<|close|>",
            ("null", "boolean", "number", "string", "array", "object"),
        ),
        marks=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        text=("", "<|close|>response<|sep|>"), final=("", "<|close|>response<|sep|><|close|>message<|sep|>"),
        excluded=("<|open|>",), between="<|open|>response<|sep|>",
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n",
        arguments=Tags("<parameter={name}>\n", "\n</parameter>\n", "</parameter>"),
    ),
    "mimo": ToolFormat(
        "<tool_call>", "<tool_call><function=", ">", "</function></tool_call>", separator="\n",
        arguments=Tags("<parameter={name}>", "</parameter>", "</parameter>"),
    ),
    "glm45": ToolFormat(
        "<tool_call>", "<tool_call>", "\n", "</tool_call>", separator="\n",
        arguments=Tags("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>"),
    ),
    "glm47": ToolFormat(
        "<tool_call>", "<tool_call>", "", "</tool_call>",
        arguments=Tags("<arg_key>{name}</arg_key><arg_value>", "</arg_value>", "</arg_value>"),
    ),
    "minimax-m2": ToolFormat(
        "<minimax:tool_call>", '<invoke name="', '">\n', "</invoke>\n",
        opening="<minimax:tool_call>\n", closing="</minimax:tool_call>",
        arguments=Tags('<parameter name="{name}">', "</parameter>\n", "</parameter>"),
    ),
    "minimax-m3": ToolFormat(
        f"{_MINIMAX_M3}<tool_call>", f'{_MINIMAX_M3}<invoke name="', '">', f"{_MINIMAX_M3}</invoke>\n",
        opening=f"{_MINIMAX_M3}<tool_call>\n", closing=f"{_MINIMAX_M3}</tool_call>",
        arguments=Tags(
            f"{_MINIMAX_M3}<{{name}}>", f"{_MINIMAX_M3}</{{name}}>", _MINIMAX_M3,
            item=(f"{_MINIMAX_M3}<item>", f"{_MINIMAX_M3}</item>"),
        ),
    ),
    "hunyuan": _build_hunyuan_format(""),
    "hunyuan-opensource": _build_hunyuan_format(":opensource"),
    "k2_horizon": ToolFormat(
        "<ifm|tool_calls>", "<ifm|tool_call>", "\n", "</ifm|tool_call>\n",
        opening="<ifm|tool_calls>\n", closing="</ifm|tool_calls>",
        arguments=Tags(
            "<ifm|arg_key>{name}</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n", "</ifm|arg_value>"
        ),
    ),
    "iquest_q1": ToolFormat(
        "<iquest_tool_call>", "<iquest_tool_call>", "", "</iquest_tool_call>",
        arguments=Tags("<arg_key>{name}</arg_key><arg_value>", "</arg_value>", "</arg_value>"),
    ),
    "step3": ToolFormat(
        "<｜tool_calls_begin｜>", '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">\n',
        "</steptml:invoke><｜tool_call_end｜>\n",
        opening="<｜tool_calls_begin｜>\n", closing="<｜tool_calls_end｜>",
        arguments=Tags('<steptml:parameter name="{name}">', "</steptml:parameter>\n", "</steptml:parameter>"),
    ),
    "dots": ToolFormat(
        "<dots_function_call>", '<invoke name="', '">\n', "</invoke>\n",
        opening="<dots_function_call>\n", closing="</dots_function_call>",
        arguments=Tags('<parameter name="{name}">\n', "\n</parameter>\n", "</parameter>"),
    ),
    "minicpm5": ToolFormat(
        "<function name=", '<function name="', '">', "</function>", separator="\n",
        arguments=Tags(
            '<param name="{name}">', "</param>", "</param>", wrapper=("<![CDATA[", "]]>")
        ),
    ),
    "interns1": ToolFormat(
        "<|action_start|>", '<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}\n<|action_end|>",
        separator="\n",
        variants=(
            ('<|action_start|> <|plugin|>\n{"name": "', '", "parameters": '),
            ('<|action_start|><|plugin|>\n{\n    "name": "', '",\n    "parameters": '),
        ),
    ),
    "apertus2509": ToolFormat(
        "<|tools_prefix|>", '{"', '": ', "}", opening="<|tools_prefix|>[", closing="]<|tools_suffix|>", separator=", ",
    ),
    "gigachat3": ToolFormat(
        "<|message_sep|>\n\nfunction call<|role_sep|>", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "',
        '", "arguments": ', "}", variants=(('<|function_call|>{"name": "', '", "arguments": '),),
        marks=("<|message_sep|>",),
    ),
    "gigachat35": _build_dsml_format("tool_calls", mark="｜GCML｜"),
    "pythonic": ToolFormat(
        "[", "", "(", ")", opening="[", closing="]", separator=", ", arguments=_PYTHON, by_name=True,
        marks=("<|python_start|>", "<|python_end|>"),
    ),
    "lfm2": ToolFormat(
        "<|tool_call_start|>", "", "(", ")", opening="<|tool_call_start|>[", closing="]<|tool_call_end|>",
        separator=", ", arguments=_PYTHON,
    ),
    "gemma4": ToolFormat(
        "<|tool_call>", "<|tool_call>call:", "{", "}<tool_call|>",
        arguments=Notation(":", ",", quote='<|"|>', nested=True),
    ),
    "cohere_command4": ToolFormat(
        "<|START_ACTION|>", '{"tool_call_id": "#", "tool_name": "', '", "parameters": ', "}",
        opening="<|START_ACTION|>[\n    ", closing="\n]<|END_ACTION|>", separator=",\n    ",
        marks=("<|START_TEXT|>", "<|END_TEXT|>"), between="",
    ),
    "cohere": ToolFormat(
        "<cofl:tool_calls>", '<cofl:tool_call id="#" name="', '">', "</cofl:tool_call>",
        opening="<cofl:tool_calls>", closing="</cofl:tool_calls>",
        arguments=Tags(
            '<cofl:value name="{name}" type="{type}">', "</cofl:value>", "</cofl:value>",
            ("json", "json", "json", "raw", "list", "dict"), item=('<cofl:value type="{type}">', "</cofl:value>"),
        ),
        marks=("<|START_TEXT|>", "<|END_TEXT|>"), between="",
    ),
    # <|eot|> ends the sequence, so no grammar requires it.
    "muse": ToolFormat(
        " to=", ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="', '">\n',
        "</atem:invoke>\n</atem:function_calls>", separator="<|eom|><|start|>assistant",
        arguments=Tags('<atem:parameter name="{name}">', "</atem:parameter>\n", "</atem:parameter>"),
        marks=(" to=user<|message|>", "<|start|>assistant", "<|eom|>", "<|eot|>"),
        text=(" to=user<|message|>", "<|eom|><|start|>assistant"), final=(" to=user<|message|>", ""),
        excluded=("<|message|>", "<|start|>"), between="<|start|>assistant",
    ),
    # <|call|> and <|return|> end the sequence, so no grammar requires them.
    "gpt-oss": ToolFormat(
        _HARMONY, _HARMONY, " <|constrain|>json<|message|>", "", separator="<|call|><|start|>assistant",
        variants=(
            (_HARMONY, "<|constrain|>json<|message|>"),
            (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
            (" to=functions.", "<|channel|>commentary json<|message|>"),
        ),
        marks=(*_HARMONY_MARKS, "<|call|>", "<|return|>"),
        text=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        final=("<|channel|>final<|message|>", ""), excluded=("<|channel|>", "<|message|>", "<|start|>"),
        between="<|start|>assistant",
    ),
}  # fmt: skip
_OTHER_NAMES = {
    "qwen25": "qwen",
    "hermes": "qwen",
    "glm": "glm45",
    "step3p5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "spark25": "glm47",
    "trinity": "qwen",
}
# for other families, because most models without their own format were trained with this one
DEFAULT = "qwen"

# Tokens with these texts are part of a model's output text, even if its tokenizer marks them as
# special.
MARKS = frozenset({
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜",
    "<minimax:tool_call>", "</minimax:tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>",
    "<|open|>", "<|close|>", "<|sep|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>",
    "<|START_THINKING|>", "<|END_THINKING|>", "<cofl:tool_calls>", "</cofl:tool_calls>",
    *(
        f"<{slash}{name}{suffix}>"
        for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value") for slash in ("", "/")
        for suffix in ("", ":opensource")
    ),
    *(
        f"<{slash}ifm|{name}>" for name in ("tool_calls", "tool_call", "arg_key", "arg_value") for slash in ("", "/")
    ),
    "<iquest_tool_call>", "</iquest_tool_call>", "<dots_function_call>", "</dots_function_call>",
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>",
    "<|action_start|>", "<|plugin|>", "<|action_end|>", "<|tools_prefix|>", "<|tools_suffix|>",
    "<|message_sep|>", "<|role_sep|>", "<|function_call|>", "｜GCML｜",
    "<function", "</function>", "<param", "</param>", "<|tool_call_start|>", "<|tool_call>", "<tool_call|>", '<|"|>',
})  # fmt: skip

# The MARKS that never separate turns. If a tokenizer does not mark these tokens as special,
# they are ordinary text.
NON_TURN_MARKS = MARKS - {"<|open|>", "<|close|>", "<|sep|>", "<|message_sep|>", "<|role_sep|>"}

_HARMONY_TOKENS = frozenset({"<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"})
_MUSE_TOKENS = frozenset({"<|message|>", "<|start|>", "<|eom|>"})


def select_output_marks(tokens: Iterable[str]) -> frozenset[str]:
    """Returns the special tokens that are part of a model's output text, such as the marks of tool
    calls.
    """
    found = frozenset(tokens)
    # in other formats, <|end|> and <|eom|> end turns
    if "<|constrain|>" in found:
        return found & (MARKS | _HARMONY_TOKENS)
    return found & (MARKS | _MUSE_TOKENS if found >= _MUSE_TOKENS else MARKS)


# Strings in a chat template that identify its call format (None for an unsupported format). The
# first match counts.
_TEMPLATE_SIGNS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (None, ("[CALL_ID]",)),
    ("kimi_k3", ("<|open|>", "'tools'", "'argument'")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("muse", ("<atem:function_calls>", "<|eom|>")),
    ("lfm2", ("<|tool_call_start|>[",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("gigachat35", ("｜GCML｜",)),
    ("gigachat3", ("<|role_sep|>", "function call")),
    ("step3", ("<steptml:invoke",)),
    ("dots", ("<dots_function_call>",)),
    ("minicpm5", ("<function name=", "<param name=")),
    ("interns1", ("<|action_start|>", "<|plugin|>")),
    ("apertus2509", ("<|tools_prefix|>",)),
    ("k2_horizon", ("<ifm|tool_call>", "<ifm|arg_key>")),
    ("iquest_q1", ("<iquest_tool_call>", "<arg_key>")),
    ("hunyuan-opensource", ("<tool_sep", ":opensource")),
    ("hunyuan", ("<tool_sep>", "<arg_key>")),
    ("deepseekv41", ("｜DSML｜ calls",)),
    ("deepseekv32", ("｜DSML｜", "function_calls")),
    ("deepseekv4", ("｜DSML｜", "tool_calls>")),
    ("deepseekv3", (_DEEPSEEK, "```json")),
    ("deepseekv31", (_DEEPSEEK,)),
    ("mistral-v13", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral-nemo", ("[TOOL_CALLS][",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gpt-oss", ("<|channel|>commentary", "functions.", " to=")),
    ("minimax-m3", (_MINIMAX_M3,)),
    ("minimax-m2", ("<minimax:tool_call>", "<invoke name=")),
    ("cohere", ("<cofl:tool_call", "<cofl:value")),
    ("cohere_command4", ("<|START_ACTION|>", '"tool_call_id": ')),
    ("mimo", ("<tool_call><function=", "<parameter=")),
    ("qwen3_coder", ("<tool_call>\n<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "</arg_key>\n<arg_value>")),
    ("glm47", ("<tool_call>", "<arg_key>")),
    *((None, (unknown,)) for unknown in ("<function=", "<arg_key>", "<invoke", "<tool_sep")),
    ("exaone", ('<tool_call>{"name": ', '"arguments": ')),
    ("qwen", ("<tool_call>", '"arguments": ')),
    ("llama3", ('{"name": ', '"parameters": ')),
)


@lru_cache(maxsize=64)
def detect_tool_family(template: str | None) -> str | None:
    """Returns the key of FORMATS for a model's chat template, or None if the template shows no
    calls or an unsupported format.
    """
    source = (template or "").replace("\\n", "\n").replace('\\"', '"')
    return next(
        (family for family, signs in _TEMPLATE_SIGNS if all(sign in source for sign in signs)), None
    )


def tool_format(family: str) -> ToolFormat:
    """Returns the format of a family. Raises ParameterError if the family is unknown."""
    found = FORMATS.get(_OTHER_NAMES.get(family, family))
    if found is None:
        names = ", ".join((*FORMATS, *_OTHER_NAMES))
        raise ParameterError("tool_format", f"{family!r} is unknown.", hint=f"Known: {names}.")
    return found
