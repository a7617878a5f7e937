"""The command, for shells that need a name for it."""

from aiopersist.cli import main

main()
