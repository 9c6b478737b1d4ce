"""The path of a request from its submission to its end: building it, its steps, its output; programs."""
