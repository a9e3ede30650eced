"""Entry point of the command line; reports missing packages."""

import sys


def main() -> None:
    """Run `fwlab`, if the packages of the extra "train" are installed."""
    try:
        from fwlab.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fwlab"):
            raise
        print(
            f"fwlab: the command line needs the package {error.name}: "
            'pip install "fwlab[train]"',
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
