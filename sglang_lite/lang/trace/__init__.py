"""The trace of a run: what each node said, when, and at what cost; as data, as a file, as a page, as spans."""

from sglang_lite.lang.trace.page import as_html as as_html
from sglang_lite.lang.trace.spans import spans as spans
from sglang_lite.lang.trace.trace import Trace as Trace
