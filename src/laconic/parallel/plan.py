"""A division as data: which layer is divided how. Frozen, JSON both ways, checked when it is made.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from laconic import specs
from laconic.errors import BadInput, PayloadError
from laconic.registry import Registry
from laconic.storage import json_text

REGISTRY: Registry[type[Form]] = Registry("form of division")
register = REGISTRY.register


@dataclass(frozen=True)
class Form:
    """How a layer is divided; its fields are checked when it is made."""

    name: ClassVar[str] = ""
    whole_model: ClassVar[bool] = False  # it divides the model itself, not single layers

    def __str__(self) -> str:
        return specs.spec_of(self)


@dataclass(frozen=True)
class Plan:
    """Forms by pattern, in order; the first pattern that matches a module is the one that holds.

    >>> plan = Plan.of("fc1=dense(output); fc2=dense(input)")
    >>> Plan.of(plan.to_json()) == plan
    True
    >>> print(plan)
    fc1=dense(output); fc2=dense(input)
    """

    entries: tuple[tuple[str, Form], ...]

    @classmethod
    def of(cls, given: Plan | Form | Mapping[str, Form | str] | str) -> Plan:
        """The plan that a form, a mapping of patterns to forms, a spec or a JSON text names.

        Raises:
            UnknownName: no such form or option.
            BadInput: it cannot be read, or does not go together.
        """
        if isinstance(given, Plan):
            return given
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
            value = json_text.parse(text)
            rows = [(row["match"], row["form"], row.get("options", {})) for row in value["division"]]
        except (PayloadError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"the division is not one that to_json wrote: {error}") from None
        entries = []
        for match, name, options in rows:
            form = REGISTRY.get(str(name))
            unknown = set(options) - {each.name for each in dataclasses.fields(form)}
            if unknown:
                raise BadInput(f"form '{name}' has no option {', '.join(sorted(unknown))}")
            entries.append((str(match), form(**{key: _frozen(value) for key, value in options.items()})))
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

    def layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, Form]]:
        """(name, module, form) of every module that is divided, in the model's order.

        Raises:
            BadInput: a pattern matches nothing; the sentence lists the model's layers.
        """
        unused = dict.fromkeys(pattern for pattern, _ in self.entries)
        for name, module in model.named_modules():
            for pattern, form in self.entries:
                if matches(pattern, name):
                    unused.pop(pattern, None)
                    yield name, module, form
                    break
        if unused:
            names = [name for name, module in model.named_modules() if name and not list(module.children())]
            some = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            raise BadInput(f"the pattern '{next(iter(unused))}' matches no layer of the model; its layers: {some}")

    def __str__(self) -> str:
        return "; ".join(f"{pattern}={form}" if pattern else str(form) for pattern, form in self.entries)


def matches(pattern: str, name: str) -> bool:
    """Whether a module's name fits a pattern, piece by piece between the dots.

    >>> matches("blocks.*.widen", "blocks.3.widen"), matches("blocks.*", "blocks.3.widen")
    (True, False)
    """
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(map(fnmatchcase, found, wanted))


def one_of(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Refuse a word that is not one of these."""
    if value not in valid:
        raise BadInput(f"{what} is {', '.join(valid[:-1])} or {valid[-1]}, got {value!r}")


def _form(value: Form | str) -> Form:
    if isinstance(value, Form):
        return value
    if isinstance(value, str) and not re.match(r"\s*$", value):
        return specs.build(REGISTRY, value)
    raise BadInput(f"a layer is divided by a form such as Dense('output'), got {value!r}")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
