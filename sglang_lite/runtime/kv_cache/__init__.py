"""Pages of the KV cache, the prefix tree and the slot table. Needs only numpy; keys and values
belong to the runner.
"""
