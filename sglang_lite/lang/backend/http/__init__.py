"""HTTP for backends: connections and their limits, the protocol of our server, and the execution of
whole programs on it.
"""
