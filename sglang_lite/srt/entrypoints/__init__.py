"""SGLang's module path for its entry points: re-exports of what its users import."""
