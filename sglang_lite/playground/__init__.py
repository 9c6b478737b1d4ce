"""`sglang-lite playground`: a page that changes the texts of a program and runs it."""
