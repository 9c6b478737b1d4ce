"""HTTP: connections and their limits, our server's protocol, and whole programs."""
