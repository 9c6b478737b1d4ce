"""The choice of which requests run, and of what each step computes. Independent of models, texts and threads."""
