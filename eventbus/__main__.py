"""``python -m eventbus``: read the journal of a bus, dead or alive."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from eventbus.errors import EventBusError
from eventbus.recording import read_journal

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return _tail(given) if given.command == "tail" else _replay(given)
    except EventBusError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eventbus", description="Read the journal of an event bus.")
    commands = parser.add_subparsers(dest="command", required=True)
    tail = commands.add_parser("tail", help="print events as lines of JSON")
    tail.add_argument("-n", "--last", type=int, metavar="N", help="only the last N of them")
    tail.add_argument("-f", "--follow", action="store_true", help="go on with those that come, until Ctrl-C")
    replay = commands.add_parser("replay", help="deliver events once more, with the numbers they had")
    replay.add_argument(
        "--to", required=True, metavar="TARGET",
        help="a URL (https://…), a file (….jsonl, ….csv), or module:name of a sink or a function of one event",
    )  # fmt: skip
    for command in (tail, replay):
        command.add_argument("directory", type=Path, metavar="DIR", help="the directory of EventBus(journal=DIR)")
        command.add_argument(
            "--hook", action="append", default=[], metavar="HOOK", help="a hook or pattern; repeatable"
        )
        command.add_argument("--after", type=int, default=0, metavar="SEQ", help="only events with a higher number")
    return parser


def _tail(given: argparse.Namespace) -> int:
    from eventbus.tail import tail

    tail(given.directory, hooks=given.hook, last=given.last, after=given.after, keep_on=given.follow)
    return 0


def _replay(given: argparse.Namespace) -> int:
    import anyio

    from eventbus.replay import replay, target_of

    target, events = target_of(given.to), read_journal(given.directory, after=given.after)
    delivered, failed = anyio.run(lambda: replay(events, target, hooks=given.hook))
    print(f"{delivered} events delivered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
