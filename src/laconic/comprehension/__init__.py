"""Code as data: programs as LLVM IR, statements as vectors, and what these vectors are worth.

An application of the library: nothing below knows it. The way of a program:

    ir.py          a file becomes IR text, through clang, llvm-as and llvmlite
    statements.py  the text becomes statements, without names and literals
    graph.py       statements become a flow graph; drawing.py draws it

Source: Ben-Nun, Jakobovits, Hoefler, Neural Code Comprehension: A Learnable Representation of Code Semantics
(inst2vec), NeurIPS 2018.
"""
