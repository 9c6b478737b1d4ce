"""A type whose fields the model is not told of."""

from pydantic import BaseModel, Field

import sglang_lite as sgl


class Person(BaseModel):
    name: str
    born: int = Field(description="year")


@sgl.function
def extract(s, text):
    s += sgl.user(f"Read this letter, and answer in JSON: {text}")
    s += sgl.assistant(sgl.gen("who", type=Person, max_tokens=60))  # fault: hidden-fields
