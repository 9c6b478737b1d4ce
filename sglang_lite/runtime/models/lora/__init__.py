"""LoRA adapters: their files, and which of them are in host memory and on the device."""
