"""The server: an engine behind the protocols of SGLang's, OpenAI's and Anthropic's clients.

Each protocol's files convert a request to a prompt, parameters and a constraint, and convert events
to answers. They know neither the language nor how an engine runs.
"""
