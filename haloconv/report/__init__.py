"""What was measured: rows, the tables for the terminal, JSON, and one self-contained page."""

from haloconv.report.networks import Network, network_table, networks_of
from haloconv.report.report import Report
from haloconv.report.rows import Row
from haloconv.report.summary import FileOutcome, score_lines, summary_table
from haloconv.report.table import StreamedTable, as_table, print_table

__all__ = [
    "FileOutcome",
    "Network",
    "Report",
    "Row",
    "StreamedTable",
    "as_table",
    "network_table",
    "networks_of",
    "print_table",
    "score_lines",
    "summary_table",
]
