"""`sglang-lite playground`: a page that edits the texts of a program and runs it."""
