"""The report of a run: one self-contained HTML page, a Chrome trace, TensorBoard events.

`write_report` writes all three into a run directory; `read_history` is what they are made from.
"""

from headway.report.history.reader import read_history
from headway.report.history.records import RunHistory
from headway.report.write import ReportFiles, write_report

__all__ = ["ReportFiles", "RunHistory", "read_history", "write_report"]
