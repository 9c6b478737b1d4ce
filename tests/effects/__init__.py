"""Effects of the rows of tables: each row's, seen through a public door, and gone when the place
that it names is.
"""
