"""Requests in, tokens out: the engine, its parameters, its tokenizer and its command line."""
