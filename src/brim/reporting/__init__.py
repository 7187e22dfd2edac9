"""Run folders as pages: one self-contained HTML file, read offline, on a phone, in the dark or on paper.

JSON documents become rows (`rows/`), rows become charts (`charts/`), both become sections (`kinds/`, `comparisons/`),
and sections become a page (`page.py`). Nothing here runs a model or changes a run.
"""
