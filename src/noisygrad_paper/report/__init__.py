"""Results as pages: tables, figures and settings in one HTML file that needs nothing else."""

from noisygrad.pages.page import Page
from noisygrad.pages.tables import Column, Table

__all__ = ["Column", "Page", "Table"]
