"""Trace of a run, with the text, time and usage of each node. It is available as data, as a file,
as an HTML page, and as OpenTelemetry spans.
"""

from sglang_lite.lang.runs.page import as_html as as_html
from sglang_lite.lang.runs.spans import spans as spans
from sglang_lite.lang.runs.trace import Trace as Trace
from sglang_lite.lang.runs.trajectory import Trajectory as Trajectory
