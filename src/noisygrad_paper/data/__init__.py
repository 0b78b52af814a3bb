"""Data sets with their standard splits: download with checksums, a cache, images made worse, a CSV of one's own."""

from noisygrad_paper.data.catalogue import DATA_SETS, UnknownDataSetError, data_directory
from noisygrad_paper.data.corruptions import CORRUPTIONS, corrupted
from noisygrad_paper.data.files import DamagedDataError, MissingDataError
from noisygrad_paper.data.images import Images, load_images, load_out_of_distribution, subset
from noisygrad_paper.data.own_csv import CsvError, read_csv_table
from noisygrad_paper.data.splits import Split, Standardised, splits_of, standard_splits, standardised
from noisygrad_paper.data.tables import DataTable, load_table

__all__ = [
    "CORRUPTIONS",
    "DATA_SETS",
    "CsvError",
    "DamagedDataError",
    "Images",
    "MissingDataError",
    "Split",
    "Standardised",
    "DataTable",
    "UnknownDataSetError",
    "corrupted",
    "data_directory",
    "load_images",
    "load_out_of_distribution",
    "load_table",
    "read_csv_table",
    "splits_of",
    "standard_splits",
    "standardised",
    "subset",
]
