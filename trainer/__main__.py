"""``python -m trainer demo`` (or ``trainbus demo``): see the whole idea work on real data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="trainbus", description="An asynchronous event bus for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train on handwritten digits, with files and a slow webhook")
    demo.add_argument("--epochs", type=int, default=5, help="epochs of each of the four trainings (default: 5)")
    demo.add_argument("--folder", type=Path, default=Path("runs"), help="where the files go (default: runs)")
    given = parser.parse_args(arguments)
    try:
        from trainer.demo import run
    except ModuleNotFoundError as missing:
        print(f'The demo needs {missing.name}: pip install "trainbus[demo]"', file=sys.stderr)
        return 1
    return run(epochs=given.epochs, folder=given.folder)


if __name__ == "__main__":
    sys.exit(main())
