"""How a tensor of few values becomes bytes, and back to the bit.

    kernels.py  the adaptive binary range coder with its model of which weights were pruned
    chunks.py   a tensor as tiles that are coded apart, on several threads
    exact.py    any tensor without loss, byte plane by byte plane
    han.py      the layout of Deep Compression, to compare with
"""
