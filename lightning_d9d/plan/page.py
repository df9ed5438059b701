"""A plan as one page of HTML, which loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from lightning_d9d.errors import ConfigError, reason
from lightning_d9d.plan.planning import Plan
from lightning_d9d.plan.text import (
    GIB,
    PARTS,
    SECONDS,
    changes,
    degrees,
    gib,
    limit,
    memory_rows,
    shown_ranks,
    uncounted,
    verdict,
)
from lightning_d9d.schedule.plot import KINDS, bars

_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f2a93b", "#b279a2", "#72b7b2", "#9d755d")
_MOST_BARS = 6000
_MOST_RANKS = 32
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; }
svg { width: 100%; min-width: 640px; height: auto; font-size: 12px; }
svg text { fill: currentColor; }
table { border-collapse: collapse; margin: 0.8em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.1em 0.8em; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2em; list-style: none; margin: 0; padding: 0; }
.legend span { display: inline-block; width: 1em; height: 0.7em; margin-right: 0.4em; }
.bad { color: #c22; font-weight: 600; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_WIDTH, _BAR, _GAP, _LEFT = 1000, 22, 8, 120


def write_page(plan: Plan, path: str | Path) -> None:
    """Write the page of a plan to a file. Local.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(page_of(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason(error)}; give another file") from error


def page_of(plan: Plan) -> str:
    """Return the page. Local."""
    model, ranks = plan.model, shown_ranks(plan)
    title = f"{plan.num_parameters / 1e9:.2f} B parameters on {model.mesh.world_size} x {plan.machine.device}"
    shape = f"{model.num_microbatches} x {model.rows} rows of {model.tokens} tokens on each data rank"
    mfu = ", ".join(f"MFU with {name} attention {share:.1%}" for name, share in plan.mfu.items())
    seconds = {SECONDS[name]: getattr(plan.timed.seconds, name) for name in SECONDS}
    sent = [(name, f"{of / 1e9:.2f}", f"{alone:.4f}") for name, (of, alone) in plan.timed.links.items()]
    memory_header = ["GiB", *(f"pipeline rank {each.rank}" for each in ranks)]
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{type(model.schedule).__name__}, {shape}, {plan.tokens:,} tokens a step, "
        f"recompute {escape(model.parallel.recompute)}. A step takes {plan.step_seconds:.3f} s, which is "
        f"{plan.tokens_per_second:,.0f} tokens/s a GPU; {mfu}.</p>",
        f'<p class="{"bad" if plan.missing > 0 else ""}">The plan {escape(verdict(plan))}.</p>',
        "<h2>Memory at the peak</h2>",
        *_memory(plan),
        *_table(memory_header, memory_rows(ranks)),
        *_loads(plan),
        "<h2>The step</h2>",
        *_table(["", "s", "share"], [(k, f"{v:.4f}", f"{v / plan.step_seconds:.1%}") for k, v in seconds.items() if v]),
        f"<p>The step is {escape(limit(plan))}.</p>",
        *_changes(plan),
        *_gantt(plan),
        "<h2>Messages</h2>",
        *_table(["axis", "degree", "link"], degrees(plan)),
        *_table(["link", "GB a step", "s alone"], sent),
        *([f"<p>Counted as without: {escape(settings)}.</p>"] if (settings := uncounted(plan)) else []),
        f"<p>Rates: {escape(plan.machine.source)}. Not measured on this device: "
        f"{escape(', '.join(plan.machine.not_measured) or 'none')}.</p>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    yield "<tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in header) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _loads(plan: Plan) -> Iterator[str]:
    if found := plan.needed_by_load:
        yield "<p>If the experts of a rank get more tokens than an even share, it needs:</p>"
        yield from _table(["times an even share", "GiB"], [(f"{load:.3g}", gib(each)) for load, each in found.items()])


def _changes(plan: Plan) -> Iterator[str]:
    heading, *lines = changes(plan) or [""]
    if lines:
        yield (
            f"<p>{escape(heading.capitalize())}</p><ul>"
            + "".join(f"<li>{escape(line.strip())}</li>" for line in lines)
            + "</ul>"
        )


def _legend(colours: Iterable[tuple[str, str]]) -> str:
    items = (f'<li><span style="background:{colour}"></span>{escape(name)}</li>' for name, colour in colours)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _memory(plan: Plan) -> Iterator[str]:
    """Draw a bar of parts for each rank of the pipeline, and a line at the memory of the device."""
    ranks, most = plan.ranks[:_MOST_RANKS], plan.machine.memory_bytes
    scale = (_WIDTH - _LEFT) / max(most, *(each.needed for each in ranks))
    height = len(ranks) * (_BAR + _GAP)
    yield f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height + 20}" role="img" aria-label="Memory of ranks">'
    for index, each in enumerate(ranks):
        x, y = float(_LEFT), index * (_BAR + _GAP)
        yield f'<text x="0" y="{y + 15}">rank {each.rank}, {gib(each.needed)} GiB</text>'
        values = [getattr(each.peak, name) for name in PARTS]
        for value, colour in zip([*values, each.needed - each.peak.total], (*_COLOURS, "#999"), strict=True):
            width = value * scale
            if width > 0:
                yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
            x += width
    line = _LEFT + most * scale
    yield f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="4 3"/>'
    yield f'<text x="{line - 4:.1f}" y="{height + 14}" text-anchor="end">{most / GIB:.1f} GiB</text></svg></div>'
    yield _legend([*zip(PARTS.values(), _COLOURS, strict=True), ("allocator, CUDA and nccl", "#999")])


def _gantt(plan: Plan) -> Iterator[str]:
    """Draw what each rank of the pipeline computes when; nothing without a pipeline."""
    drawn = bars(plan.timed.simulation)
    if plan.model.mesh.pipeline_parallel == 1 or len(drawn) > _MOST_BARS:
        return
    ranks, end = plan.model.mesh.pipeline_parallel, max(bar.start + bar.length for bar in drawn)
    scale, colours = (_WIDTH - _LEFT) / end, {kind: colour for kind, (colour, _) in KINDS.items()}
    height = ranks * (_BAR + _GAP)
    yield f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Actions of ranks over time">'
    for rank in range(ranks):
        yield f'<text x="0" y="{rank * (_BAR + _GAP) + 15}">rank {rank}</text>'
    for bar in drawn:
        y = bar.rank * (_BAR + _GAP) + bar.top * _BAR
        x, width = _LEFT + bar.start * scale, max(0.5, bar.length * scale - 0.5)
        yield (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{bar.height * _BAR:.1f}" '
            f'fill="{colours[bar.kind]}" fill-opacity="{1 - 0.4 * bar.shade:.2f}"/>'
        )
    yield "</svg></div>"
    kinds = dict.fromkeys(bar.kind for bar in drawn)
    yield _legend((kind, colours[kind]) for kind in kinds)
