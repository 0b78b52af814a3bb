"""Data sets with their standard splits: download with checksums, a cache, and a CSV of one's own."""

from noisygrad.data.catalogue import DATA_SETS, DataSet, UnknownDataSetError, data_directory, data_set
from noisygrad.data.files import DamagedDataError, MissingDataError
from noisygrad.data.own_csv import CsvError, read_csv_table
from noisygrad.data.splits import Split, Standardised, splits_of, standard_splits, standardised
from noisygrad.data.tables import Table, load_table

__all__ = [
    "DATA_SETS",
    "CsvError",
    "DamagedDataError",
    "DataSet",
    "MissingDataError",
    "Split",
    "Standardised",
    "Table",
    "UnknownDataSetError",
    "data_directory",
    "data_set",
    "load_table",
    "read_csv_table",
    "splits_of",
    "standard_splits",
    "standardised",
]
