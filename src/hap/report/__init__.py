"""The report: one self-contained page made from result files, and from nothing else."""

from hap.report.page import write_report

__all__ = ["write_report"]
