"""How good the answers are: one file per metric, pure functions of predictions and references."""
