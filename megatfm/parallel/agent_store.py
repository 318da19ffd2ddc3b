"""Meeting in a store that outlives its ranks: torchrun's agents keep one over all restarts (torch 2.13).

What an earlier start left there (who has arrived, where its ranks listen) must not be taken for this one's. The
restart count that torchrun gives doesn't tell starts apart: an agent that restarts because another one did so doesn't
count it. So rank 0 makes up a name for the start, and the ranks find it out by names that they make up themselves.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megatfm.errors import MegatfmError

POLL_SECONDS = 0.02


def restart_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the store that no other start uses. A collective of the ranks of a start.

    Raises MegatfmError where rank 0 doesn't come. That others don't is for whoever waits for them to say.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"megatfm/hello/{rank}", name)
        try:
            store.wait([f"megatfm/welcome/{name}"], timeout)
        except dist.DistError as error:
            raise MegatfmError(
                f"rank 0 of {world_size} never came, within {timeout.total_seconds():g} s: see its log, or the machine "
                "that it should run on"
            ) from error
        part = dist.PrefixStore(store.get(f"megatfm/welcome/{name}").decode(), store)
        part.set(f"megatfm/knows/{rank}", "1")
        return part
    part = dist.PrefixStore(name, store)
    missing, answered = set(range(1, world_size)), dict[int, bytes]()
    deadline = time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < deadline:
        for other in sorted(missing):
            if part.check([f"megatfm/knows/{other}"]):
                missing.remove(other)
            elif store.check([f"megatfm/hello/{other}"]):
                # It may be an earlier start's, which nobody waits for any more: then another one follows.
                hello = store.get(f"megatfm/hello/{other}")
                if answered.get(other) != hello:
                    store.set(f"megatfm/welcome/{hello.decode()}", name)
                    answered[other] = hello
        time.sleep(POLL_SECONDS)
    return part
