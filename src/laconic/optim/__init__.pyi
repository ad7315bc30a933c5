from .base import ExchangingOptimizer as ExchangingOptimizer
from .demo import DeMo as DeMo
from .dion import Dion as Dion
from .muon import Muon as Muon
from .onebit_adam import OneBitAdam as OneBitAdam
from .onebit_lamb import OneBitLamb as OneBitLamb
from .zero_one_adam import ZeroOneAdam as ZeroOneAdam
