"""The engine's runtime. Import it before torch: it limits how long torch's idle threads spin
(host/openmp.py).
"""

from sglang_lite.runtime.host import openmp as openmp
