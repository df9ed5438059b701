"""Pages about runs, made from the files of loggers: `lightning-d9d report DIRECTORY`.

They need neither torch nor Lightning.

`files.py` finds the files of a run, and `series.py` reads the values of its jobs. `charts.py` decides which values
share a chart, and `svg.py` and `image.py` draw. `page.py` puts everything on one page, and `command.py` is the
subcommand.
"""

from lightning_d9d.report.charts import Chart, Line, charts_of
from lightning_d9d.report.command import Report, make_report
from lightning_d9d.report.files import Found, find_files
from lightning_d9d.report.series import Run, read_run

__all__ = ["Chart", "Found", "Line", "Report", "Run", "charts_of", "find_files", "make_report", "read_run"]
