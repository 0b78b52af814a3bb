"""`noisygrad reproduce …`: one command for each table or figure of the paper."""

import typer

from noisygrad_paper.reproduce.classification import classification
from noisygrad_paper.reproduce.exploration import exploration
from noisygrad_paper.reproduce.few_labels import active_learning, hmc_correlation
from noisygrad_paper.reproduce.figures import convergence, precision_matrices
from noisygrad_paper.reproduce.regression import regression

app = typer.Typer(help="Regenerate a table or a figure of the paper.", no_args_is_help=True, rich_markup_mode="rich")
app.command()(regression)
app.command()(classification)
app.command("hmc-correlation")(hmc_correlation)
app.command("active-learning")(active_learning)
app.command()(exploration)
app.command()(convergence)
app.command("precision-matrices")(precision_matrices)
