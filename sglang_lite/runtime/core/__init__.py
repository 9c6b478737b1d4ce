"""Processing of requests from submission to result: request building, the step loop, and programs."""
