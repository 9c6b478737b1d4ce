"""Adapters (LoRA): reading them, and which of them are resident on the device."""
