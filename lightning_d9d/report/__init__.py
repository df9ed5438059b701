"""Pages about runs, made from what loggers wrote: `lightning-d9d report DIRECTORY`. Without torch and Lightning.

`files.py` finds what a run left, and `series.py` reads the values of its jobs. `charts.py` says which of them are drawn
together, and `svg.py` and `image.py` draw. `page.py` puts all on one page, and `command.py` is the subcommand.
"""

from lightning_d9d.report.charts import Chart, Line, charts_of
from lightning_d9d.report.command import Report, make_report
from lightning_d9d.report.files import Found, find_files
from lightning_d9d.report.series import Run, read_run

__all__ = ["Chart", "Found", "Line", "Report", "Run", "charts_of", "find_files", "make_report", "read_run"]
