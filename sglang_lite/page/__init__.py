"""HTML pages that show runs: those of traces, the playground, and a server."""
