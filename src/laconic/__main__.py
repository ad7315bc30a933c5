"""`python -m laconic` is the `laconic` command."""

from laconic.cli import main

main()
