"""Output in notebooks: escaped HTML, progress bars, and HTML that is updated below a cell."""
