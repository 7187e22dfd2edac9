"""How a batch size is chosen: trials as evidence, what is known before the first, and three strategies. No torch."""
