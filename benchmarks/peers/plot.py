"""The plot of docs/performance.md: bars, written by hand, so that no library is needed."""

from html import escape

from benchmarks.peers.results import Results
from benchmarks.peers.subjects import SUBJECTS

_PANELS = (
    ("drain1_per_s", "drain, one process: tasks/s"),
    ("drain2_per_s", "drain, two processes: tasks/s"),
    ("submit_per_s", "submit one by one: tasks/s"),
    ("bulk_per_s", "submit in bulk: tasks/s"),
    ("latency_p50_ms", "submit to start, median: ms (less is better)"),
    ("latency_p99_ms", "submit to start, 99 %: ms (less is better)"),
)
_COLUMNS = 2
_PANEL_WIDTH, _NAME, _BAR, _LINE = 440, 110, 240, 20
_COLOURS = {"floor": "#9aa0a6", "lineshaft": "#c2410c"}
_PEER = "#4b6a88"


def svg(results: Results) -> str:
    panels = [
        (title, rows)
        for figure, title in _PANELS
        if (
            rows := [
                (subject.name, subject.title, value)
                for subject in SUBJECTS
                if (value := results.median(subject.name, figure)) is not None
            ]
        )
    ]
    height = (max((len(rows) for _, rows in panels), default=0) + 3) * _LINE
    deep = -(-len(panels) // _COLUMNS)
    width = _COLUMNS * _PANEL_WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{deep * height}">',
        '<g font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, (title, rows) in enumerate(panels):
        left, top = number % _COLUMNS * _PANEL_WIDTH + 10, number // _COLUMNS * height + _LINE
        parts.append(f'<text x="{left}" y="{top}" font-weight="bold">{escape(title)}</text>')
        most = max(value for _, _, value in rows)
        for line, (name, label, value) in enumerate(rows, 1):
            at = top + line * _LINE
            bar = max(value / most * _BAR, 1)
            figure = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004
            parts.append(f'<text x="{left + _NAME - 6}" y="{at}" text-anchor="end">{escape(label)}</text>')
            parts.append(
                f'<rect x="{left + _NAME}" y="{at - 11}" width="{bar:.1f}" height="14" '
                f'fill="{_COLOURS.get(name, _PEER)}"/>'
            )
            parts.append(f'<text x="{left + _NAME + bar + 5:.1f}" y="{at}">{figure}</text>')
    parts.append("</g></svg>")
    return "\n".join(parts) + "\n"
