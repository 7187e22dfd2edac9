"""The same training for several seeds and learning rates: stacked where that is faster, else one after the other."""
