"""What was measured: rows, the table for the terminal, JSON, and one self-contained page."""

from haloconv.report.report import Report
from haloconv.report.rows import Row
from haloconv.report.table import as_table, print_table

__all__ = ["Report", "Row", "as_table", "print_table"]
