"""Models: specifications read from checkpoint configs, the parameter table, and the decoders.
Independent of requests.
"""
