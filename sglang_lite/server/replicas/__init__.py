"""Several servers of one model behind a gateway, watched, and started again when they die."""
