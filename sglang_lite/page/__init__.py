"""HTML pages that show runs. Traces, the playground and the server use them."""
