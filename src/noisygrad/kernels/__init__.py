"""Fast and memory-saving products, roots and squares: oneDNN, bands of triangles, Triton, threads, scratch memory.

Nothing here depends on posteriors or networks. Whatever depends on the type of a device is here, so that families and
passes can be written as formulas.
"""
