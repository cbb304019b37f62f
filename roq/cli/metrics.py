"""The command that serves metrics to Prometheus."""

from __future__ import annotations

from contextlib import suppress

import click

from roq.cli.common import Target, needs_extra, notice, target

__all__ = ["COMMANDS"]


@click.command()
@target
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=9108,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 picks a free one.",
)
def metrics(target: Target, host: str, port: int) -> None:
    """Serve a run's metrics to Prometheus.

    Listens at http://HOST:PORT/metrics until stopped. Read-only; start and stop it at any time. Needs `pip
    install '.[metrics]'`. docs/metrics.md lists the metrics; deploy/ has a Grafana dashboard and alert rules.
    """
    needs_extra("prometheus_client", "metrics")
    from roq.observe.prometheus.exporter import Exporter

    with target.scheduler() as scheduler:
        exporter = Exporter(target.url, target.run, scheduler.config())
        server, thread = exporter.serve(host, port)
        notice(f"metrics of run {target.run} at http://{host}:{server.server_port}/metrics")
        try:
            with suppress(KeyboardInterrupt):
                exporter.follow(lambda: True)
        finally:
            server.shutdown()
            thread.join(5)


COMMANDS = (metrics,)
