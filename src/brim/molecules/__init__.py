"""Detectors of out-of-distribution molecules (`brim ood`) and features of molecules (`brim encode`).

This package is an example of how a field builds on brim: nothing in the layers before it knows of molecules. What it
brings is its own (encoders, files, losses, baselines, a table); the rest it takes from these seams:

- `brim.map` encodes molecules in batches that fit, each once, resumable (`encoding.py`);
- `brim.training` trains many small networks at once: a model for each seed, rows, a criterion and a validation figure
  go in, the best weights of each run come out (`heads.py`, the only file that imports from it);
- `brim.data` reads tables and text files, `brim.metrics` scores (`files.py`, `cells.py`);
- `brim.storage` has the run folder with its lock, the journal of finished cells, fingerprints (`run.py`);
- `brim.settings` declares the settings once (`molecule_settings.py`): flags, Python calls, checks.
"""
