"""The same decoders, fuzzed by coverage: whatever reaches a new branch is mutated further.

    pip install atheris
    python -m tests.fuzz.coverage log --seconds 60 --found /tmp/log

`atheris` (libFuzzer) has no wheels for every platform, so this is beside the tests. It ends with the bytes
that raised another error than the documented ones, or took too long; `--found` keeps what reached new
branches.
"""

import argparse
import sys
from pathlib import Path
from tempfile import mkdtemp


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["aiopersist"]):
        from tests.fuzz.decoders import DECODERS
        from tests.fuzz.test_fuzz import attempt, values_of

    parser = argparse.ArgumentParser("python -m tests.fuzz.coverage", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=DECODERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--found", type=Path, default=None, help="a folder")
    chosen = parser.parse_args()
    folder = chosen.found or Path(mkdtemp())
    folder.mkdir(exist_ok=True)
    for number, value in enumerate(values_of(chosen.kind)):
        (folder / f"corpus-{number}").write_bytes(value)
    options = [
        f"-max_total_time={chosen.seconds}",
        "-timeout=10",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={folder}/",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder)], lambda data: attempt(chosen.kind, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
