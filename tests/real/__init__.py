"""Tests with models that people use. `make test-real` runs them; `make test` doesn't."""
