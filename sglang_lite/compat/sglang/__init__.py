"""SGLang's offline engine, its hooks of backends, and helpers that its users import and nothing else here needs."""
