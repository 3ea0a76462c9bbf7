"""Where agents reach the model: one file a dialect over one internal call, and every call in the record with its exact
tokens before its last byte leaves.
"""
