"""One HTML page without a network: text, tables and pictures. The demo writes one, and so does the paper's report."""
