from .base import ExchangingOptimizer as ExchangingOptimizer
from .demo import DeMo as DeMo
from .dion import Dion as Dion
from .onebit_adam import OneBitAdam as OneBitAdam
from .zero_one_adam import ZeroOneAdam as ZeroOneAdam
