"""Languages as texts for engines: Lark, GBNF, regexes. Knows neither where a language is from nor any engine's API."""
