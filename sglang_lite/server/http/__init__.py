"""HTTP itself, which knows no protocol: bodies within limits, server-sent events, the address to listen at."""
