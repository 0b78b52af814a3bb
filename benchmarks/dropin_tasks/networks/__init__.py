"""Small networks as practitioners write them, by torch's own layers and its own initialisation."""
