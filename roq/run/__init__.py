"""A whole run on one machine: ``roq up``, its processes and its embedded server."""
