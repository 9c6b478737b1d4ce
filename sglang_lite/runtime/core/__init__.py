"""What happens to a request between its submission and its end: building it, its steps, its output; programs."""
