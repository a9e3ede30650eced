"""Entry point of the command line; reports missing packages."""

import sys

#: Modules that the extra "train" installs.
EXTRA = ("accelerate", "pooch", "safetensors", "tqdm", "tyro")


def main() -> None:
    """Run `fwlab`, if the packages of the extra "train" are installed."""
    try:
        from fwlab.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        print(
            f"fwlab: the command line needs the package {error.name}: "
            'pip install "fwlab[train]"',
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
