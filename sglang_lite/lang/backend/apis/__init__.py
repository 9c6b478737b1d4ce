"""Forms of APIs, a file each: a question as a request, a response as deltas. No calls."""
