"""The executor loop, threads for what blocks, values and streams that many wait for, batches. Knows no programs."""
