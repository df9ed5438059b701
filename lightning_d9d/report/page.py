"""The page about a run: one file of HTML with everything in it, which loads nothing and runs no script.

It is well-formed XML, too.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_d9d.report.charts import Chart, ends
from lightning_d9d.report.files import Found
from lightning_d9d.report.series import Point, Run
from lightning_d9d.report.svg import draw, number, text

MAX_PICTURE_BYTES = 4 * 2**20
MAX_HANG_CHARACTERS = 200_000
MAX_HANGS = 10

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em; }
h1 { margin-bottom: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 1.5em; }
figure { margin: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font-size: 13px; overflow: visible; }
svg text { fill: currentColor; }
svg path, svg circle { vector-effect: non-scaling-stroke; stroke-width: 1.5; }
svg .grid { stroke: currentColor; stroke-width: 1; opacity: 0.15; }
svg .restart { stroke: currentColor; stroke-width: 1; stroke-dasharray: 4 4; opacity: 0.6; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2em; list-style: none; margin: 0; padding: 0; font-size: 13px; }
.legend span { display: inline-block; width: 1em; height: 0.7em; margin-right: 0.4em; }
img { max-width: 100%; background: white; }
pre { overflow-x: auto; white-space: pre-wrap; font-size: 12px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.1em 0.8em; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; min-width: 12em; }
.wide { overflow-x: auto; }
@media (max-width: 600px) { body { margin: 1em auto; } h1 { font-size: 1.5em; } svg { font-size: 17px; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_of(run: Run, charts: Sequence[Chart], found: Found) -> str:
    """Return the page. Function that reads pictures and reports of hangs. Local.

    Args:
        run: The values, for the table of all of them.
        charts: Title of the run.
        found: Further files of the run.

    Raises:
        OSError: A picture or a report cannot be read.
    """
    title = text(", ".join(str(folder) for folder in run.folders))
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>A run in steps {_steps(run)}</h1><p>{title}</p>",
        *_notes(run),
        '<div class="charts">',
        *(_figure(chart, run.restarts) for chart in charts),
        "</div>",
        *_pictures(found.pictures),
        *_hangs(found.hangs),
        *_table(run),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _steps(run: Run) -> str:
    steps = [points[index][0] for points in run.values.values() for index in (0, -1)]
    return f"{min(steps)} to {max(steps)}"


def _notes(run: Run) -> Iterator[str]:
    notes = list(run.notes)
    if run.restarts:
        steps = ", ".join(map(str, run.restarts))
        notes.append(f"A job went on from a checkpoint, and logged first at step {steps}: the broken lines.")
    for name, points in run.values.items():
        bad = [step for step, value in points if not math.isfinite(value)]
        if bad:
            notes.append(f"{name} is NaN or infinite at {len(bad)} of {len(points)} steps, first at step {bad[0]}.")
    yield from (f"<p>{text(note)}</p>" for note in notes)


def _figure(chart: Chart, restarts: Sequence[float]) -> str:
    lines = ends(chart.lines)
    entries = "".join(f'<li><span style="background: {line.colour}"></span>{text(line.name)}</li>' for line in lines)
    more = len(chart.lines) - len(lines)
    entries += f"<li>and {more} between them</li>" if more else ""
    return (
        f"<figure><figcaption>{text(chart.title)}</figcaption>{draw(chart, restarts)}"
        f'<ul class="legend">{entries}</ul></figure>'
    )


def _pictures(paths: Sequence[Path]) -> Iterator[str]:
    if paths:
        yield '<h2>Pictures</h2><div class="charts">'
    for path in paths:
        name = text(str(path))
        if path.stat().st_size > MAX_PICTURE_BYTES:
            yield f"<p>{name} is larger than {MAX_PICTURE_BYTES >> 20} MiB, and left out.</p>"
            continue
        kind = {".png": "image/png", ".svg": "image/svg+xml"}[path.suffix]
        content = base64.b64encode(path.read_bytes()).decode()
        yield (
            f'<figure><figcaption>{name}</figcaption><img alt="{name}" src="data:{kind};base64,{content}"/></figure>'
        )
    if paths:
        yield "</div>"


def _hangs(paths: Sequence[Path]) -> Iterator[str]:
    if paths:
        yield "<h2>Reports of hangs</h2>"
    if len(paths) > MAX_HANGS:
        yield f"<p>The last {MAX_HANGS} of {len(paths)}.</p>"
    for path in paths[-MAX_HANGS:]:
        with path.open(encoding="utf-8", errors="replace") as file:
            content = file.read(MAX_HANG_CHARACTERS + 1)
        if len(content) > MAX_HANG_CHARACTERS:
            content = f"{content[:MAX_HANG_CHARACTERS]}\n... and more in {path}"
        yield f"<details><summary>{text(str(path))}</summary><pre>{text(content)}</pre></details>"


def _table(run: Run) -> Iterator[str]:
    yield '<h2>All values</h2><div class="wide"><table><thead><tr>'
    yield "".join(f"<th>{head}</th>" for head in ("name", "values", "first", "last", "smallest", "largest"))
    yield "</tr></thead><tbody>"
    for name in sorted(run.values):
        cells = "".join(f"<td>{cell}</td>" for cell in _row(run.values[name]))
        yield f"<tr><td>{text(name)}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def _row(points: Sequence[Point]) -> list[str]:
    values = [value for _, value in points]
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return [str(len(values)), *map(number, (values[0], values[-1], min(finite), max(finite)))]
