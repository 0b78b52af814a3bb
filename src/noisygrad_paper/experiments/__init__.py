"""One module per table or figure; each is a function from a configuration to rows of results."""
