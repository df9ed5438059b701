"""Pictures of learning-rate schedules. It needs the extra `viz`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_d9d.errors import ConfigError
from lightning_d9d.optim.rates import PiecewiseLR
from lightning_d9d.pictures import write_picture


def learning_rates(scheduler: LRScheduler, num_steps: int) -> list[float]:
    """Step a schedule through a run, and return the learning rate of each optimizer step. Local.

    Args:
        scheduler: New. Schedule, which is stepped together with its optimizer; its parameters should have no gradients.
        num_steps: Optimizer steps of the run. A `PiecewiseLR` without a known number takes this number.

    Returns:
        One number for each step: the learning rate of the optimizer's first group.

    Raises:
        ConfigError: The run has no steps, or the schedule follows a metric or does not fit.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps} must be at least 1, because a picture has a point for each step")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(f"{type(scheduler).__name__} follows a metric, so its learning rates are known only in a run")
    if isinstance(scheduler, PiecewiseLR) and scheduler.total_steps is None:
        scheduler.set_total_steps(num_steps)
    optimizer, rates = scheduler.optimizer, list[float]()
    for _ in range(num_steps):
        rate = optimizer.param_groups[0]["lr"]
        rates.append(rate.item() if isinstance(rate, Tensor) else float(rate))
        optimizer.step()
        scheduler.step()
    return rates


def plot_learning_rates(rates: Mapping[str, Sequence[float]], path: str | Path, title: str = "") -> None:
    """Draw learning rates over optimizer steps, with a line for each schedule. Local.

    Args:
        rates: Learning rates by name of the schedule, as from `learning_rates`.
        path: File that ends in .png or .svg (drawn by matplotlib) or .html (by plotly, which can be zoomed).
        title: Title above the picture.

    Raises:
        ConfigError: The path has another ending, there is nothing to draw, or the library is not installed.
    """
    if not any(rates.values()):
        raise ConfigError("there is nothing to draw: no schedule has a step")
    write_picture(path, *(partial(draw, rates, title) for draw in (_draw_image, _draw_page)))


def _draw_image(rates: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in rates.items():
        axes.plot(range(len(values)), values, label=name, gid=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def _draw_page(rates: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for name, values in rates.items():
        figure.add_scatter(name=name, x=list(range(len(values))), y=list(values), mode="lines")
    figure.update_layout(title=title, xaxis_title="optimizer step", yaxis_title="learning rate", showlegend=True)
    figure.write_html(path)
