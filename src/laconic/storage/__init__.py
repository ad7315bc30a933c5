"""State on disk: trees of tensors, atomic files, checked JSON, checkpoints.

Callers: everything above that reads or writes files. Nothing here communicates between ranks, and nothing that is read
is ever executed: no pickle.

    files.py        replace a file as a whole, create one that nobody has, append to one that others append to
    json_text.py    JSON and lines of JSON, with one typed error for everything that can be wrong with them
    tree.py         a tree of values and tensors as one checked block of bytes
    checkpoints.py  the checkpoint files of one worker, and the newest step that all workers have
"""
