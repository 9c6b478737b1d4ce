"""Features and prices of models, a file a provider, with sources; and what reads them."""
