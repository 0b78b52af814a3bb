"""The demonstration: needs nothing but the core, and is done in a minute."""
