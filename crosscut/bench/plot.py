"""`--plot FILE.html`: time and bus bandwidth over size, a panel an operation; one page that needs nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from crosscut.bench.measure import Measured

COLOURS = {"gloo": "#8a8f98", "shm": "#d1495b", "nccl": "#76b900", "threads": "#3d6cb9"}
DASHES = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot")


def require() -> None:
    """Raise ValueError unless plotly is there."""
    if importlib.util.find_spec("plotly") is None:
        raise ValueError("--plot needs plotly, which is not installed: pip install 'crosscut[plot]'")


def write_plot(path: str, measured: Measured) -> None:
    """Write the page. Raises ValueError if the file cannot be written."""
    try:
        Path(path).write_text(page(measured), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--plot {path}: cannot be written ({error.strerror})") from error


def page(measured: Measured) -> str:
    """The HTML, plotly's script included."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    ops = [op for op in measured.plan.ops if any(row["op"] == op for row in measured.rows)]
    height = 340 * max(1, len(ops)) + 120
    figure = make_subplots(
        rows=max(1, len(ops)),
        cols=2,
        vertical_spacing=100 / height,  # room for the label below a panel and the title above the next
        subplot_titles=[f"{op}: {what}" for op in ops for what in ("time", "busbw")],
    )
    lines: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in measured.rows:
        lines.setdefault((row["backend"], row["via"], row["algorithm"]), {}).setdefault(row["op"], []).append(row)
    kinds = list(dict.fromkeys((via, algorithm) for _, via, algorithm in lines))
    for (backend, via, algorithm), by_op in lines.items():
        name, first = f"{backend}, {algorithm or via}", True
        style = {"color": COLOURS[backend], "dash": DASHES[kinds.index((via, algorithm)) % len(DASHES)]}
        for op, rows in by_op.items():
            for column, key, unit in ((1, "time_us_median", "us"), (2, "busbw_gbs", "GB/s")):
                figure.add_trace(
                    graph_objects.Scatter(
                        x=[row["bytes"] for row in rows],
                        y=[row[key] for row in rows],
                        name=name,
                        legendgroup=name,
                        showlegend=first,
                        mode="lines+markers",
                        line=style,
                        hovertemplate=f"{name}<br>%{{x:,}} bytes<br>%{{y:.4g}} {unit}<extra></extra>",
                    ),
                    row=ops.index(op) + 1,
                    col=column,
                )
                first = False
    figure.update_xaxes(type="log", title_text="S, bytes")
    figure.update_yaxes(type="log", dtick=1, title_text="us (median)", col=1)
    figure.update_yaxes(title_text="GB/s", rangemode="tozero", col=2)
    plan = measured.plan
    figure.update_layout(
        title=f"crosscut bench collectives: {plan.world_size} ranks of 1 thread, {plan.dtype}, {plan.trials} trials",
        template="plotly_white",
        height=height,
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
