"""What the processes of one run tell each other, by a function that they were given: the bus itself talks to nobody."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eventbus.request import Request

if TYPE_CHECKING:
    from eventbus.fitness import Sums

__all__ = ["Gather", "merged_sums", "shared_requests"]

#: Gives every process the values of all, in the same order; each calls it at the same point of its loop.
Gather = Callable[[Any], Sequence[Any]]


def shared_requests(
    requests: Sequence[Request], gather: Gather, refuse: Callable[[Request, str], object]
) -> list[Request]:
    """The requests made in any process, in one order for all of them; `refuse` those that cannot be told."""
    own = {request.id: request for request in requests if _can_be_told(request, refuse)}
    told = gather([_as_told(request) for request in own.values()])
    return [own.get(fields["id"]) or Request(**fields) for theirs in told for fields in theirs]


def _can_be_told(request: Request, refuse: Callable[[Request, str], object]) -> bool:
    try:
        pickle.dumps(_as_told(request))
    except Exception as why:  # noqa: BLE001  # whatever the value's own __reduce__ raises
        refuse(request, f"the other processes cannot be told: {why}")
        return False
    return True


def _as_told(request: Request) -> dict[str, Any]:
    names = ("id", "action", "run", "reason", "requester")
    return {name: getattr(request, name) for name in names} | {"arguments": dict(request.arguments)}


def merged_sums(sums: Sums, gather: Gather) -> Sums:
    """The sums of all processes."""
    merged: Sums = {}
    for theirs in gather(sums):
        for name, (total, weight) in theirs.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + total, before[1] + weight)
    return merged
