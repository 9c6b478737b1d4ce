"""SGLang's own protocol and settings: its dictionaries as requests and answers, over HTTP and in
`sgl.Engine`.
"""
