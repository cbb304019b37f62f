"""``roq report``: a self-contained HTML page about a run, and its plots as PNGs."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from roq.errors import ConfigError
from roq.events.history import FATES
from roq.observe.plots import COLORS, Drawn, draw
from roq.observe.timeline import Timeline, cause, verdict, wait_shares
from roq.text import clock, printable

__all__ = ["write_report"]

LONGEST = 8  # waits shown
ENDS = 5  # batches averaged for the first and the last reward

STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.about { color: var(--quiet); margin: .2rem 0 1rem; }
p.verdict { font-size: 1.1rem; border-left: 4px solid var(--train); padding-left: .8rem; }
p.warning { border-left: 4px solid var(--red); padding-left: .8rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .8rem;
  margin: 1.2rem 0; }
dt { color: var(--quiet); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; }
figure { margin: 1.2rem 0; } svg { width: 100%; height: auto; } svg text { font-family: inherit; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--quiet); font-weight: normal; } td.n, th.n { text-align: right; }
"""


def write_report(timeline: Timeline, out: Path) -> list[Path]:
    """Write the page to ``out``, and each plot as a PNG to a folder of the same name; returns the paths.

    Raises:
        ConfigError: no batch was taken yet, or the page cannot be written.
    """
    if not timeline.steps:
        raise ConfigError("nothing to report: no batch was taken yet, or its event was trimmed")
    figures = draw(timeline)
    folder = out.with_suffix("")
    files = {out: _page(timeline, figures).encode()}
    files |= {folder / f"{figure.name}.png": figure.png for figure in figures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}; choose another --out") from None
    return list(files)


def _page(timeline: Timeline, figures: Sequence[Drawn]) -> str:
    title = _html(f"run {timeline.run}" if timeline.run else "a run")
    colors = {
        scheme: " ".join(f"--{name}: {pair[i]};" for name, pair in COLORS.items())
        for i, scheme in enumerate(("LIGHT", "DARK"))
    }
    style = STYLE.replace("LIGHT", colors["LIGHT"]).replace("DARK", colors["DARK"])
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>roq: {title}</title><style>{style}</style></head><body>",
        f"<h1>{title[0].upper() + title[1:]}</h1>",
        f'<p class="about">{_html(_about(timeline))}</p>',
        *(f'<p class="warning">{_html(text)}</p>' for text in _warnings(timeline)),
        f'<p class="verdict">{_html(verdict(timeline))}</p>',
        _numbers(timeline),
        *(f'<figure id="{figure.name}">{figure.svg}</figure>' for figure in figures),
        _waits(timeline),
        _fates(timeline),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _html(text: str) -> str:
    return html.escape(printable(text))


def _about(timeline: Timeline) -> str:
    state = "ended" if timeline.ended else "not ended"
    steps = sum(step.published is not None for step in timeline.steps)
    workers = len(timeline.attached)
    return f"{steps} steps in {clock(timeline.wall_s)}, η = {timeline.eta}, {workers} workers; {state}"


def _warnings(timeline: Timeline) -> list[str]:
    if timeline.whole:
        return []
    if timeline.missing == 0:
        return ["The events do not start with the run's creation: this report omits everything before them."]
    many = "An unknown number of" if timeline.missing is None else f"{timeline.missing:,}"
    return [f"{many} events were trimmed before they were read: this report omits them."]


def _numbers(timeline: Timeline) -> str:
    stale = [staleness for step in timeline.steps for staleness in step.staleness.elements()]
    rewards = [step.reward for step in timeline.steps if step.reward is not None]
    tokens, wall = timeline.tokens(), timeline.work_s or 1.0
    waste = sum(tokens.get(fate, 0) for fate in FATES)
    found = wait_shares(timeline)
    facts = [
        ("steps", f"{sum(step.published is not None for step in timeline.steps)}"),
        ("mean reward, start → end", _ends(rewards)),
        ("staleness, mean and max", f"{fmean(stale):.2f}, {max(stale)}" if stale else "?"),
        ("trained tokens per second", f"{tokens.get('trained', 0) / wall:,.0f}"),
        ("finished tokens left untrained", f"{waste / (sum(tokens.values()) or 1):.1%}"),
        (
            "trainer waited, after step 1",
            "?" if found is None else f"{clock(found.trainer_s)}, {found.trainer:.0%}",
        ),
        (
            "workers idle, after step 1",
            "?" if found is None or found.workers is None else f"{found.workers:.0%}",
        ),
        ("claims lost with a lease", f"{timeline.expired}"),
        ("claims given back", f"{timeline.released}"),
    ]
    if timeline.generated is not None:
        unfinished = max(0, timeline.generated - sum(tokens.values()))
        facts.append(("tokens cancelled or unfinished", f"{unfinished / (timeline.generated or 1):.1%}"))
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts) + "</dl>"


def _ends(rewards: Sequence[float]) -> str:
    return f"{fmean(rewards[:ENDS]):.3f} → {fmean(rewards[-ENDS:]):.3f}" if rewards else "?"


def _waits(timeline: Timeline) -> str:
    known = [step for step in timeline.steps if step.wait_s > 0]
    longest = sorted(known, key=lambda step: step.wait_s, reverse=True)[:LONGEST]
    rows = [(str(s.number), clock(s.wait_s), cause(timeline, s)) for s in longest]
    return "<h2>The trainer's longest waits</h2>" + _table(("step", "waited", "why"), rows, "rr")


def _fates(timeline: Timeline) -> str:
    groups: dict[str, list[int]] = {}
    for group in timeline.groups.values():
        reason = f"{group.state}: {group.reason}"[:120] if group.reason else group.state
        groups.setdefault(reason, []).append(group.tokens)
    rows = [(name, f"{len(tokens):,}", f"{sum(tokens):,}") for name, tokens in sorted(groups.items())]
    return "<h2>Fates of the groups</h2>" + _table(("fate", "groups", "finished tokens"), rows, "lrr")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: str) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        places = [' class="n"' if right[i : i + 1] == "r" else "" for i in range(len(cells))]
        texts = [f"<{tag}{p}>{_html(c)}</{tag}>" for p, c in zip(places, cells, strict=True)]
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="wide"><table>{row("th", header)}{body}</table></div>'
