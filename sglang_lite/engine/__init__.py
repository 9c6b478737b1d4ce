"""The public engine and the line to its process. Imports only the torch-free parts of `runtime`, unless an engine runs
in this process."""
