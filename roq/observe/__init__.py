"""Observe a run: metrics, terminal text, plots, reports, Prometheus."""
