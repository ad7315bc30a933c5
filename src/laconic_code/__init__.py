"""Code as data: programs as LLVM IR, statements as vectors, and what these vectors are worth.

An application of the library `laconic`, which does not know it: `laconic code …` is found by an entry point
(`commands/`). The way of a program:

    ir.py          a file becomes IR text, through clang, llvm-as and llvmlite
    statements.py  the text becomes statements, without names and literals
    graph.py       statements become a flow graph; drawing.py draws it
    corpus.py      many files at once, kept once they are read
    embedding.py   a vocabulary and its vectors, trained by skipgram.py on neighbours in the graph;
                   embedding_job.py trains one from files
    analogies.py   what an embedding knows of the language; chart.py draws it as a map
    programs.py    programs as rows of numbers, by an embedding or a control
    networks.py    networks over the sequence and over the graph
    classify.py    classes of programs in folders
    device_mapping.py, coarsening.py   tasks on measured data, which archives.py reads; selection.py chooses a forest

Source: Ben-Nun, Jakobovits, Hoefler, Neural Code Comprehension: A Learnable Representation of Code Semantics
(inst2vec), NeurIPS 2018.
"""
