"""Features and prices of models, with sources, one file per provider, and the code that reads them."""
