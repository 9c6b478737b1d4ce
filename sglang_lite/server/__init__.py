"""The server: an engine behind the protocols of SGLang's, OpenAI's and Anthropic's clients.

The file of a protocol converts a request to a prompt, parameters and a constraint, and events to
answers. It knows neither the language nor how an engine runs.
"""
