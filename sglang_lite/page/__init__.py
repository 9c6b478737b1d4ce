"""HTML pages that show runs: of traces, the playground, and a server."""
