"""Helpers that SGLang's users import and that nothing else here needs. Modules at SGLang's module paths re-export
them."""
