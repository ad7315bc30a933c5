"""Deep Gradient Compression: each rank applies momentum before it selects, so that delayed values keep it.

Callers: the DDP hook, for `laconic.compress(ddp, "topk(0.001)", momentum=0.9)`. An optimiser with
momentum does not work with ranks that hold values back: it sees a value once, when it arrives, without the momentum
that it would have gathered meanwhile. So each rank k keeps a velocity u beside the residual v of its feedback:

    clip          g ← g · min(1, √P · clip_norm / ‖g‖)        for each parameter
    correct       u ← m·u + g ;   v ← v + u                   Nesterov: v ← v + g + m·u
    select, send  from v
    mask          v ← 0 and u ← 0 where something was sent

and the optimiser is plain SGD. Parameters that are sent whole (exempt ones, and all of them while the codec is no
selector) follow the same rule without the mask: the mean of the ranks' velocities is the velocity of their mean.

Invariant: a velocity belongs to a parameter's name, so that neither DDP's rebuilding of buckets nor a new codec
touches it.

Source: Lin et al., Deep Gradient Compression, ICLR 2018.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from laconic.codecs import Codec, threads
from laconic.codecs.entropy import Entropy
from laconic.codecs.selector import Sparse
from laconic.errors import BadInput
from laconic.exchange.layout import Entry
from laconic.exchange.residuals import PLAIN, Encoder, Site, mode_for
from laconic.kernels import njit
from laconic.storage.form import check_named
from laconic.storage.tree import own_copy

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 4096  # elements updated and then checked at a time: 32 KB of two vectors, a first-level cache


@dataclass(frozen=True)
class DeepGradientCompression:
    """What `laconic.compress(momentum=…)` takes; a number stands for this with defaults.

    With it the optimiser must be plain SGD, without momentum of its own: `step()` of one that has some raises BadInput.
    Weight decay that the optimiser adds gathers no momentum: to match SGD(momentum=m, weight_decay=d), give it
    d/(1 − m).

    Cost: one more float32 per parameter, and one pass that reads and writes it and the gradient.

    Args:
        momentum: m, from 0 to below 1.
        nesterov: Nesterov's form, as torch.optim.SGD has it.
        clip_norm: the largest norm of a parameter's mean gradient over P ranks; each rank clips what it contributes to
            it, g/P, to clip_norm/√P, the norm of one of P independent parts of such a mean. None does not clip.
        masking: stop the momentum of what was sent (momentum factor masking); for selectors only, which know it.

    Raises:
        BadInput: momentum or clip_norm out of range.

    >>> DeepGradientCompression(0.9, clip_norm=1.0)
    DeepGradientCompression(momentum=0.9, nesterov=False, clip_norm=1.0, masking=True)

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, §3 and Alg. 4.
    Differs: clips by parameter, since DDP sends the first bucket before the norm of all is known; the paper clips by
    the norm of the whole gradient. Selects over neighbouring parameters of a bucket together, exactly; the paper
    selects by layer, with a threshold estimated from a sample.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = None
    masking: bool = True

    def __post_init__(self) -> None:
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise BadInput(f"momentum must be a number from 0 to below 1, got {self.momentum!r}")
        if self.clip_norm is not None and (not _is_number(self.clip_norm) or not 0 < self.clip_norm < math.inf):
            raise BadInput(f"clip_norm must be a positive number or None, got {self.clip_norm!r}")
        if not isinstance(self.nesterov, bool) or not isinstance(self.masking, bool):
            raise BadInput(f"nesterov and masking must be True or False, got {self.nesterov!r} and {self.masking!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class MomentumCorrection:
    """The velocities of one rank, by parameter name, and what is done with them: a `Wrapper` around feedback.

    >>> correction, gradient = MomentumCorrection(DeepGradientCompression(0.5)), torch.ones(2)
    >>> for _ in range(3):
    ...     correction.before([Entry("weight", 0, 2, False)], gradient.fill_(1.0), world_size=1)
    >>> gradient.tolist()
    [1.75, 1.75]
    """

    key = "velocity"
    dense = True

    def __init__(self, settings: DeepGradientCompression) -> None:
        self.settings = settings
        self.velocities: dict[str, Tensor] = {}
        self.loss_scale = 1.0  # that gradients are multiplied by, and velocities with them

    def rescale(self, factor: float, loss_scale: float) -> None:
        """Multiply velocities by `factor`, as the gradients' scale changed."""
        self.loss_scale = loss_scale
        for velocity in self.velocities.values():
            velocity.mul_(factor)

    def before(self, entries: Sequence[Entry], values: Tensor, world_size: int, *, exact: bool = False) -> None:
        """Apply momentum to each parameter's gradient in `values`, contiguous float32, in place.

        A gradient with NaN or infinity is left as it is, and resets the parameter's velocity.
        """
        for entry in entries:
            gradient = values[entry.start : entry.stop]
            velocity = self._velocity(entry.name, gradient.numel())
            scale = self._scale(gradient, world_size)
            if not accelerate(velocity, gradient, self.settings.momentum, scale, self.settings.nesterov):
                velocity.zero_()

    def _velocity(self, name: str, numel: int) -> Tensor:
        velocity = self.velocities.get(name)
        if velocity is None:
            velocity = self.velocities[name] = torch.zeros(numel)
        if velocity.numel() != numel:
            raise BadInput(f"parameter '{name}' has {numel} values, its velocity {velocity.numel()}: another model's?")
        return velocity

    def _scale(self, gradient: Tensor, world_size: int) -> float:
        """min(1, √P · clip_norm / ‖g‖)."""
        if self.settings.clip_norm is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(gradient))
        if norm == math.inf:  # the squares overflow before the values do
            norm = float(torch.linalg.vector_norm(gradient.double()))
        most = math.sqrt(world_size) * self.settings.clip_norm * self.loss_scale
        return most / norm if norm > most else 1.0

    def wrap(self, inner: Encoder, codec: Codec, members: Sequence[Entry]) -> Encoder:
        """Mask the momentum of values that a selector sends, unless it feeds nothing back."""
        wanted = self.settings.masking and self.settings.momentum > 0
        if wanted and inner is not PLAIN and isinstance(_selecting(codec), Sparse) and mode_for(codec) != "off":
            return Masking(inner, self, members)
        return inner

    def mask(self, entries: Sequence[Entry], indices: Array) -> None:
        """Zero the velocity of sent values: `indices`, sorted, count through the parameters of `entries`."""
        start = 0
        for entry in entries:
            stop = start + entry.stop - entry.start
            first, last = np.searchsorted(indices, (start, stop))
            self.velocities[entry.name].numpy()[indices[first:last] - start] = 0.0
            start = stop

    def state_dict(self) -> dict[str, Tensor]:
        return {name: velocity.clone() for name, velocity in self.velocities.items()}

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int] | None = None) -> None:
        """Refuse what is not float32 vectors by name, of these lengths where they are given."""
        check_named(state, numels, self.key)

    def load_state_dict(self, state: Mapping[str, Tensor], *, resumed: bool = False) -> None:
        """Load velocities; reset those of other parameters."""
        self.velocities = {name: own_copy(velocity).reshape(-1).float() for name, velocity in state.items()}


@dataclass(frozen=True)
class Masking:
    """An encoder that also zeroes the momentum of sent values, for the parameters `entries` of a gathered channel."""

    inner: Encoder
    correction: MomentumCorrection
    entries: Sequence[Entry]
    gathers: bool = True

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor:
        payload = self.inner.encode(codec, x, site, step=step, out=out, copies=copies)
        self.correction.mask(self.entries, _sent(codec, payload, x.numel()) + site[1])
        return payload

    def carry(self, x: Tensor) -> Tensor:
        return self.inner.carry(x)


def _selecting(codec: Codec) -> Codec:
    """The codec within, where its payload is entropy-coded."""
    return codec.coded if isinstance(codec, Entropy) else codec


def _sent(codec: Codec, payload: Tensor, numel: int) -> Array:
    """The sorted indices that a selector's payload carries."""
    if isinstance(codec, Entropy):
        return _sent(codec.coded, codec.inner_payload(payload, numel), numel)
    if not isinstance(codec, Sparse):
        raise BadInput(f"'{codec}' is no selector: there is nothing to mask")
    indices: Array = codec.decode_sparse(payload, numel)[0].numpy()
    return indices


def correction_for(
    momentum: float | DeepGradientCompression, algorithm: str, feedback: bool | None, *, named: bool
) -> MomentumCorrection:
    """Build the wrapper for a user's `momentum`; BadInput if other options conflict with it."""
    settings = momentum if isinstance(momentum, DeepGradientCompression) else DeepGradientCompression(momentum)
    if settings.masking and algorithm not in ("auto", "gather"):
        raise BadInput(
            f"momentum factor masking needs to know what each rank sent, so algorithm must be auto or gather, got "
            f"'{algorithm}'; or give momentum=DeepGradientCompression({settings.momentum}, masking=False)"
        )
    if feedback is False:
        raise BadInput("momentum correction accumulates what was not sent: leave feedback=None, or momentum out")
    if not named:
        raise BadInput("momentum is kept by parameter name: give the state named_parameters=model.named_parameters()")
    return MomentumCorrection(settings)


def refuse_second_momentum(parameters: Iterable[Tensor]) -> RemovableHandle:
    """From now on, step() of an optimiser of these parameters raises BadInput where it has momentum of its own.

    Looked at in every step, since schedules such as OneCycleLR set an optimiser's momentum later.
    """
    known = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            own = group.get("momentum") or group.get("betas", (0,))[0]
            if own and any(id(p) in known and known[id(p)]() is p for p in group["params"]):
                raise BadInput(
                    f"{type(optimizer).__name__} has momentum {float(own):g} of its own, and the exchange applies "
                    "momentum already; use torch.optim.SGD without momentum"
                )

    return register_optimizer_step_pre_hook(check)


def accelerate(velocity: Tensor, gradient: Tensor, momentum: float, scale: float, nesterov: bool) -> bool:
    """u ← m·u + s·g, then g ← u, or g ← s·g + m·u for Nesterov; False where u is not finite everywhere.

    Velocity u and gradient g are contiguous float32, changed in place; momentum m and scale s are rounded to float32.
    """
    u, g = velocity.numpy(), gradient.detach().numpy()
    m, s = np.float32(momentum), np.float32(scale)
    return all(threads.run(lambda start, stop: bool(_accelerate(u[start:stop], g[start:stop], m, s, nesterov)), u.size))


@njit(nogil=True, cache=True)
@no_type_check
def _accelerate(velocity: Array, gradient: Array, momentum: float, scale: float, nesterov: bool) -> bool:
    top = np.int32(0)
    for start in range(0, velocity.size, _BLOCK):
        u = velocity[start : start + _BLOCK]
        g = gradient[start : start + _BLOCK]
        if nesterov:
            for i in range(u.size):
                clipped = scale * g[i]
                u[i] = momentum * u[i] + clipped
                g[i] = clipped + momentum * u[i]
        else:
            for i in range(u.size):
                u[i] = momentum * u[i] + scale * g[i]
                g[i] = u[i]
        bits = u.view(np.int32)
        for i in range(bits.size):
            top = max(top, bits[i] & np.int32(0x7FFFFFFF))
    return top < np.int32(0x7F800000)
