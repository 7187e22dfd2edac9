"""One file per kind of run: what two or more of them are compared by."""
