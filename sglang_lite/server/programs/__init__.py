"""This package's own protocol, in which a request is a whole program."""
