"""Player of programs: the rules of nodes, without threads, tokens or models. A driver performs the
effects that it requests.
"""
