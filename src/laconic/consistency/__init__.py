"""When workers agree: how the gradients or weights of several workers become one model.

`distribute(model, optimizer, consistency=…)` is the door; each mode is a file of its own.
"""
