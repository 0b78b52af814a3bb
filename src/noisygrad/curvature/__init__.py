"""From a network to Fisher statistics: which layers there are, what passed through them, what it says of the Fisher."""
