"""Matrix codecs: exchanges that need the shapes of parameters, or more of the model than its gradients.

A codec of kind "matrix" has a file here: a MatrixMethod, registered under the codec's name, and its MatrixBucket.
"""

from laconic.exchange.matrices.base import Matrices, MatrixBucket, MatrixMethod, register

__all__ = ["Matrices", "MatrixBucket", "MatrixMethod", "register"]
