"""`python -m noisygrad` is the command `noisygrad`."""

from noisygrad.cli.main import main

main(prog_name="noisygrad")
