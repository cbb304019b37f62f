"""Looking at a run: figures of its steps, text and pictures of it, reports, Prometheus."""
