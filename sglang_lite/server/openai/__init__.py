"""OpenAI's protocols: chat completions, completions, responses and decisions, with scores of given texts."""
