"""HTTP for backends: connections and their limits, the protocol of our server, and programs that
run on the server as a whole.
"""
