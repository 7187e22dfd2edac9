"""One file per kind of run: which sections its page has, declared as a `RunKind`."""
