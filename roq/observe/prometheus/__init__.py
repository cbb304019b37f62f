"""A run as Prometheus scrapes it."""
