"""Pages of the KV cache, the prefix tree and the slot table. Needs numpy alone; keys and values are the runner's."""
