"""The engine as its users see it. Knows the runtime's torch-free parts alone, until an engine runs in this process."""
