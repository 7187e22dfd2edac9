"""Rows to Vega-Lite specifications: the only place that knows Altair."""
