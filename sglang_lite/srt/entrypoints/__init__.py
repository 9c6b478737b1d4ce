"""SGLang's module path of its entry points: re-exports of what its users import."""
