"""Generation with transformers models: prefill, then one token at a time."""
