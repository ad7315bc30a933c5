"""A division as data: how each layer is divided. Frozen, to and from JSON, checked when it is made.

Callers: `laconic.divide`, the command line (`--divide SPEC`), the planner. A form is a frozen dataclass in a file of
`forms/`, registered under its name; it says how one layer is divided, or (`Stages`) the whole model.

    spec    form | pattern=form; pattern=form; …        `stages(auto, micro=8)`, `fc1=dense(output); fc2=dense(input)`

Patterns are names of modules, piece by piece between the dots, with `*` and `?` as in file names, as torch's
`parallelize_module` has them: `blocks.*.widen`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from laconic import specs
from laconic.errors import BadInput, PayloadError
from laconic.parallel.layer import Context, Layer
from laconic.registry import Registry
from laconic.storage import json_text
from laconic.storage.typed_json import from_plain

REGISTRY: Registry[type[Form]] = Registry("form of division")
register = REGISTRY.register
LAYOUTS = ("whole", "rows", "part", "grid")


@dataclass(frozen=True)
class Form:
    """How a layer is divided; its fields are checked when it is made."""

    name: ClassVar[str] = ""
    whole_model: ClassVar[bool] = False  # it divides the model itself, not single layers

    def __str__(self) -> str:
        return specs.spec_of(self)


@dataclass(frozen=True)
class DividedForm(Form):
    """A form of single layers.

    Attributes:
        kinds: the modules it divides; in other modules it divides those of these kinds.
        part: what its pieces are: "part" of the values or channels, or "area" of an image; "any" lets both through.
        opens: it can give parts to the layer after it, unless told otherwise.
        closes: it can take parts.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = ()
    part: ClassVar[str] = "part"
    opens: ClassVar[bool] = False
    closes: ClassVar[bool] = False

    @property
    def pieces(self) -> object:
        """The properties that two forms must share for one to take the other's parts."""
        return None

    def divides(self, module: nn.Module) -> bool:
        """Whether it is of these kinds; torch's attention multiplies by its `out_proj` itself, whole."""
        return isinstance(module, self.kinds) and not isinstance(module, NonDynamicallyQuantizableLinear)

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        """The divided layer that takes the module's place.

        Raises:
            BadInput: the layer cannot be divided so.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SplitForm(DividedForm):
    """A form of layers with a weight, divided by output or input."""

    split: str = "output"
    takes: str | None = None
    gives: str | None = None

    def __post_init__(self) -> None:
        for value in (self.takes, self.gives):
            one_of("takes and gives", value or "whole", LAYOUTS)

    @property
    def opens(self) -> bool:  # type: ignore[override]
        return self.split == "output"

    @property
    def closes(self) -> bool:  # type: ignore[override]
        return self.split == "input"


@runtime_checkable
class PlannedDivision(Protocol):
    """The result of `laconic.plan`, with the spec of its division; None divides nothing."""

    @property
    def division(self) -> str | None: ...


@dataclass(frozen=True)
class _KeptForm:
    """One entry of a division, as JSON has it."""

    match: str
    form: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class _KeptDivision:
    division: list[_KeptForm]


@dataclass(frozen=True)
class Plan:
    """Forms by pattern, in order; the first pattern that matches a module is the one that holds.

    >>> plan = Plan.of("fc1=dense(output); fc2=dense(input)")
    >>> Plan.of(plan.to_json()) == plan
    True
    >>> print(plan)
    fc1=dense; fc2=dense(input)
    """

    entries: tuple[tuple[str, Form], ...]

    @classmethod
    def of(cls, given: Plan | Form | Mapping[str, Form | str] | str | PlannedDivision) -> Plan:
        """The plan that a form, a mapping of patterns to forms, a spec, a JSON text or `laconic.plan` names.

        Raises:
            UnknownName: no such form or option.
            BadInput: it cannot be read, or does not go together.
        """
        if isinstance(given, Plan):
            return given
        if isinstance(given, PlannedDivision):
            if given.division is None:
                raise BadInput("the plan divides no model: give it to laconic.distribute(model, optimizer, plan=plan)")
            given = given.division
        if isinstance(given, Form):
            return cls((("", given),))
        if isinstance(given, str):
            return cls._read_json(given) if given.lstrip().startswith("{") else cls._read_spec(given)
        if not isinstance(given, Mapping):
            raise BadInput(f"a division is a form, {{pattern: form}} or a spec, got {type(given).__name__}")
        return cls(tuple((str(key), _form(value)) for key, value in given.items()))

    @classmethod
    def _read_spec(cls, text: str) -> Plan:
        if "=" not in text.partition("(")[0]:
            return cls((("", specs.build(REGISTRY, text)),))
        entries = []
        for part in filter(str.strip, text.split(";")):
            pattern, equals, spec = part.partition("=")
            if not equals or not pattern.strip():
                raise BadInput(f"a division is 'pattern=form; pattern=form', got '{part.strip()}'")
            entries.append((pattern.strip(), specs.build(REGISTRY, spec.strip())))
        return cls(tuple(entries))

    @classmethod
    def _read_json(cls, text: str) -> Plan:
        try:
            kept = from_plain(_KeptDivision, json_text.parse(text), "the JSON")
        except PayloadError as error:
            raise BadInput(f"the division is not one that to_json wrote: {error}") from None
        entries = []
        for row in kept.division:
            form = REGISTRY.get(row.form)
            unknown = row.options.keys() - {each.name for each in dataclasses.fields(form)}
            if unknown:
                raise BadInput(f"form '{row.form}' has no option {', '.join(sorted(unknown))}")
            entries.append((row.match, form(**{key: _frozen(value) for key, value in row.options.items()})))
        return cls(tuple(entries))

    def __post_init__(self) -> None:
        if not self.entries:
            raise BadInput("a division needs at least one layer, e.g. {'fc1': Dense('output')}")
        twice = [pattern for index, (pattern, _) in enumerate(self.entries)
                 if any(pattern == other for other, _ in self.entries[:index])]  # fmt: skip
        if twice:
            raise BadInput(f"the pattern '{twice[0]}' is given twice")
        if any(form.whole_model for _, form in self.entries) and (len(self.entries) > 1 or self.entries[0][0]):
            raise BadInput("stages divide the whole model and stand alone; divide layers inside a stage's own world")

    @property
    def alone(self) -> Form | None:
        """The form of the whole model, where the plan is that."""
        form = self.entries[0][1]
        return form if form.whole_model else None

    def to_json(self) -> str:
        """The plan as JSON, which `Plan.of` reads back."""
        rows = []
        for pattern, form in self.entries:
            options = {
                each.name: getattr(form, each.name)
                for each in dataclasses.fields(form)
                if getattr(form, each.name) != each.default
            }
            rows.append({"match": pattern, "form": form.name} | ({"options": options} if options else {}))
        return json.dumps({"division": rows})

    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module, Form]]:
        """(name, module, form) of every module that is divided, in the model's order.

        A pattern that matches a module with others inside means those inside that its form can divide.

        Raises:
            BadInput: a pattern matches nothing, or nothing that its form can divide.
        """
        found: dict[str, tuple[nn.Module, Form]] = {}
        modules = dict(model.named_modules())
        for pattern, form in self.entries:
            named = [name for name in modules if matches(pattern, name)]
            if not named:
                leaves = [name for name, module in modules.items() if name and not list(module.children())]
                some = ", ".join(leaves[:12]) + (", …" if len(leaves) > 12 else "")
                raise BadInput(f"the pattern '{pattern}' matches no layer of the model; its layers: {some}")
            for name in named:
                inside = _divisible(name, modules[name], form)
                found.update({each: found.get(each, (modules[each], form)) for each in inside})
        return [(name, *found[name]) for name in modules if name in found]

    def __str__(self) -> str:
        return "; ".join(f"{pattern}={form}" if pattern else str(form) for pattern, form in self.entries)


def matches(pattern: str, name: str) -> bool:
    """Whether a module's name fits a pattern, piece by piece between the dots.

    >>> matches("blocks.*.widen", "blocks.3.widen"), matches("blocks.*", "blocks.3.widen")
    (True, False)
    """
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))


def _divisible(name: str, module: nn.Module, form: Form) -> list[str]:
    """The names of what a form divides in a module: itself, or those inside."""
    if not isinstance(form, DividedForm) or form.divides(module):
        return [name]
    prefix = f"{name}." if name else ""
    inside = [prefix + each for each, inner in module.named_modules() if form.divides(inner)]
    if not inside:
        kinds = ", ".join(kind.__name__ for kind in form.kinds)
        raise BadInput(f"'{name}' is a {type(module).__name__}, and {form} divides {kinds}")
    return inside


def one_of(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Refuse a word that is not one of these."""
    if value not in valid:
        raise BadInput(f"{what} is {', '.join(valid[:-1])} or {valid[-1]}, got {value!r}")


def check_count(what: str, value: object) -> None:
    """Refuse anything but a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"{what} is a whole number from 1, got {value!r}")


def _form(value: Form | str) -> Form:
    if isinstance(value, Form):
        return value
    if isinstance(value, str) and not re.match(r"\s*$", value):
        return specs.build(REGISTRY, value)
    raise BadInput(f"a layer is divided by a form such as Dense('output'), got {value!r}")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
