"""HTTP: connections and their limits, our server's protocol, whole programs, and servers as child processes."""
