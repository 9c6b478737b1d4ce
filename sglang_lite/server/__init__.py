"""The server: an engine behind the protocols that SGLang's, OpenAI's and Anthropic's clients speak.

A protocol's file turns a request into a prompt, parameters and a constraint, and events into answers. Knows neither the
language nor how an engine runs.
"""
