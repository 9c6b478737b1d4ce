"""Names that SGLang's users import and that have no home of their own here. Its module paths re-export them."""
