"""SGLang's offline engine, its backend hooks, and helpers that only its users need."""
