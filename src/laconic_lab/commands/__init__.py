"""The laboratory's commands, which `laconic` finds by the entry point `lab` of the group `laconic.commands`."""

from laconic.cli.groups import CommandGroup, CommandTable
from laconic_lab.commands.names import check

COMMANDS = CommandTable(
    {
        "bench": CommandGroup(
            "Measure codecs, collectives, training steps and memory on this machine.",
            {
                "codecs": "laconic_lab.commands.bench:codecs",
                "collectives": "laconic_lab.commands.bench:collectives",
                "memory": "laconic_lab.commands.bench:memory",
                "step": "laconic_lab.commands.bench_step:step",
            },
        ),
        "compare": "laconic_lab.commands.compare:compare",
        "demo": "laconic_lab.commands.compare:demo",
        "doctor": "laconic_lab.commands.doctor:doctor",
        "lint": "laconic_lab.commands.report:lint",
        "plan": "laconic_lab.commands.plan:plan",
        "probe": "laconic_lab.commands.probe:probe",
        "profile": "laconic_lab.commands.plan:profile",
        "report": "laconic_lab.commands.report:report",
        "run": "laconic_lab.commands.run:run",
        "search": "laconic_lab.commands.search:search",
        "train": "laconic_lab.commands.train:train",
    },
    check,
)
