"""The `aiopersist` command. It imports the extra `cli` when it runs; without the extra it says what to
install."""

import sys


def main() -> None:
    """The entry point; exit status 2 if it cannot begin, 130 if it is interrupted, also while it begins."""
    try:
        from aiopersist.cli.app import app

        app()
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"{e.name} is not installed: pip install 'aiopersist[cli]'\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("aiopersist: interrupted\n")
        raise SystemExit(130) from None
