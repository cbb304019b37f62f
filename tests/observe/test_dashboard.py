"""What docs/ and deploy/ say of commands and figures is what the code does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from roq.observe.prometheus.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/roq.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def names(text: str) -> set[str]:
    return set(re.findall(r"\broq_\w+", text))


def test_dashboard_and_alerts_ask_for_what_there_is() -> None:
    exposed: set[str] = set()
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        exposed |= {metric.name + suffix for suffix in suffixes}
    rules = re.findall(r"expr: (.*?)\n\s+(?:for|labels):", ALERTS.read_text(), re.DOTALL)
    assert len(rules) == ALERTS.read_text().count("- alert:")
    for text in (*expressions(), *rules):
        assert names(text) <= exposed, text


def test_every_figure_is_on_the_dashboard() -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names(" ".join(expressions()))}
    assert {metric.name for metric in METRICS} <= shown


def test_dashboard_is_provisioned_where_compose_puts_it() -> None:
    dashboards = (ROOT / "deploy/grafana/provisioning/dashboards/roq.yml").read_text()
    assert "path: /var/lib/grafana/dashboards" in dashboards
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_prometheus_accepts_them(tmp_path: Path) -> None:
    def promtool(*arguments: object) -> None:
        command = ["promtool", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "config", ROOT / "deploy/prometheus/prometheus.yml")
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))
    rules = [
        {"record": f"r{i}", "expr": text.replace("$__rate_interval", "5m").replace("$run", "a")}
        for i, text in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yml")
