"""The report: one self-contained page made from result files, and from nothing else.

`page` writes it, `charts` draws its figures in the colours of `style`, and `summary` makes a row of each method. Import
`write_report`; start with `page`.
"""

from hap.report.page import write_report

__all__ = ["write_report"]
