"""Several servers of one model behind a gateway, watched, and restarted when they die."""
