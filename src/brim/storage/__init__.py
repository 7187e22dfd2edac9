"""Files that survive a crash: atomic writes, fingerprints, folders."""
