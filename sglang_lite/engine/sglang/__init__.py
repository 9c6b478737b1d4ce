"""SGLang's offline engine, on the calls of a core: its settings, its dictionaries, `generate`, `score` and `rerank`."""
