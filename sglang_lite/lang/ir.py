"""Expressions and regexes, at SGLang's module path."""

from sglang_lite.lang.expressions import REGEX_BOOL as REGEX_BOOL
from sglang_lite.lang.expressions import REGEX_FLOAT as REGEX_FLOAT
from sglang_lite.lang.expressions import REGEX_INT as REGEX_INT
from sglang_lite.lang.expressions import REGEX_STR as REGEX_STR
from sglang_lite.lang.expressions import SglAudio as SglAudio
from sglang_lite.lang.expressions import SglCommitLazy as SglCommitLazy
from sglang_lite.lang.expressions import SglConcateAndAppend as SglConcateAndAppend
from sglang_lite.lang.expressions import SglConstantText as SglConstantText
from sglang_lite.lang.expressions import SglExpr as SglExpr
from sglang_lite.lang.expressions import SglExprList as SglExprList
from sglang_lite.lang.expressions import SglFork as SglFork
from sglang_lite.lang.expressions import SglGen as SglGen
from sglang_lite.lang.expressions import SglGetForkItem as SglGetForkItem
from sglang_lite.lang.expressions import SglImage as SglImage
from sglang_lite.lang.expressions import SglRoleBegin as SglRoleBegin
from sglang_lite.lang.expressions import SglRoleEnd as SglRoleEnd
from sglang_lite.lang.expressions import SglSamplingParams as SglSamplingParams
from sglang_lite.lang.expressions import SglSelect as SglSelect
from sglang_lite.lang.expressions import SglSeparateReasoning as SglSeparateReasoning
from sglang_lite.lang.expressions import SglVarScopeBegin as SglVarScopeBegin
from sglang_lite.lang.expressions import SglVarScopeEnd as SglVarScopeEnd
from sglang_lite.lang.expressions import SglVideo as SglVideo
from sglang_lite.lang.function import SglFunction as SglFunction
from sglang_lite.lang.symbolic.symbols import SglArgument as SglArgument
from sglang_lite.lang.symbolic.symbols import SglVariable as SglVariable
