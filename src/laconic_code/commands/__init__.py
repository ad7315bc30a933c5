"""The commands `laconic code …`, which `laconic` finds by the entry point `code` of the group `laconic.commands`."""

from laconic.cli.groups import CommandGroup

CODE = CommandGroup(
    "Analyze programs: flow graphs of LLVM IR, statement embeddings, and tasks on both.",
    {
        "analogies": "laconic_code.commands.embeddings:analogies",
        "classify": "laconic_code.commands.tasks:classify",
        "coarsen": "laconic_code.commands.tasks:coarsen",
        "embed": "laconic_code.commands.embeddings:embed",
        "graph": "laconic_code.commands.embeddings:graph",
        "map": "laconic_code.commands.tasks:map_",
    },
)
