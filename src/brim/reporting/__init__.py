"""Run folders as pages: one self-contained HTML file, read offline, on a phone, in the dark or on paper.

Documents (`read.py`) become the sections of a kind of run (`kinds/`): words, tables (`base.py`) and charts as data
(`charts.py`). Sections become a page (`page.py`, `drawing.py`). Nothing here runs a model or changes a run.
"""
