"""Player of programs: decides which nodes are executed when, without threads, tokens or models of
its own. A driver performs the effects that it requests.
"""
