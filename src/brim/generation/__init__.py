"""Generation with transformers models: prefill, then one token at a time with the host out of the way."""
