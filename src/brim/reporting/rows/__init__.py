"""Documents to rows of plain values: pure functions, what is drawn and what stands in the tables alike."""
