"""The public engine and its connection to its process. Imports only the torch-free parts of
`runtime`, unless an engine runs in this process.
"""
