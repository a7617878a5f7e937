"""The `aiopersist` command. It needs the extra `cli`; without it, it says what to install.

Commands: `admin`, `cat`, `changes`, `copy`, `demos`, `doctor`, `dump`, `erase`, `load`, `ls`, `maintain`,
`publish`, `release`, `serve`, `show`, `sql`, `tables`, `tags`; `app` has their names. Others help them:

- arguments: `location`, `names`, `when`; `each` repeats a command for several shards;
- rows from files: `files`, `ndjson`, `layout`, `texts`, `appending`; rows to files: `formats`, `written`;
- output: `command` frames each command; `consoles`, `terminal`, `progress`, `shown`, `holds`.
"""

import sys


def main() -> None:
    """The entry point. Exit status 2: it cannot start; 130: it was interrupted, even at the start."""
    try:
        from aiopersist.cli.terminal import drop_unwritten, open_descriptors

        open_descriptors()
        from aiopersist.cli.app import app

        try:
            app()
        finally:
            drop_unwritten()
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich"):
            raise
        from aiopersist.base.errors import to_install

        sys.stderr.write(f"{e.name} is not installed: {to_install('cli')}\n")
        raise SystemExit(2) from None
    except OSError as e:  # cannot write the help or the version; commands report their own errors
        sys.stderr.write(f"aiopersist: {e.strerror or e}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("aiopersist: interrupted\n")
        raise SystemExit(130) from None
