"""Files of pictures, which are drawn by a library that follows from their suffix.

Needs the extra `viz`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_d9d.errors import ConfigError


def write_picture(path: str | Path, image: Callable[[Path], None], page: Callable[[Path], None]) -> None:
    """Write a picture in the format of its file name. Local.

    Args:
        path: File that ends in .png or .svg, for `image`, or in .html, for `page`.
        image: Function that draws with matplotlib.
        page: Function that draws with plotly.

    Raises:
        ConfigError: Another ending, or the library is not installed.
    """
    path = Path(path)
    draw = {".png": image, ".svg": image, ".html": page}.get(path.suffix)
    if draw is None:
        raise ConfigError(f"path={str(path)!r} must end in .png, .svg or .html")
    try:
        draw(path)
    except ImportError as error:
        raise ConfigError(
            f"drawing {path.name} needs {(error.name or '').partition('.')[0]}; pip install 'lightning-d9d[viz]'"
        ) from error
