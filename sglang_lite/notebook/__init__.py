"""Output in notebooks: escaped HTML, and what is shown below a cell."""
