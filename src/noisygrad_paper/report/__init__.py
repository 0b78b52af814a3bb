"""Results as pages: tables, figures and settings in one HTML file that needs nothing else."""
