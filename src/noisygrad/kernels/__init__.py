"""How products, roots and squares are made fast and small: oneDNN, bands of triangles, Triton, threads, scratch memory.

Nothing here knows of posteriors or networks. The families call it, and read like formulas because of it.
"""
