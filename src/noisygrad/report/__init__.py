"""Results as pages: tables, figures and settings in one HTML file that needs nothing else."""

from noisygrad.report.page import Page
from noisygrad.report.tables import Column, Table

__all__ = ["Column", "Page", "Table"]
