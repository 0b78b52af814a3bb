"""`python -m noisygrad` is the command `noisygrad`."""

from noisygrad.cli import main

main(prog_name="noisygrad")
