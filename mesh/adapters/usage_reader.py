"""Reads the pages of accounts of tokens that a region's stream keeps."""

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from mesh.adapters.region_records import RecordsUnavailable
from schemas import subjects
from schemas.ids import RegionId
from schemas.usage import UsagePage, decode_page
from schemas.wire import WireError

REQUEST_S = 5.0
NO_STREAM = 10059  # of JetStream's error codes; 10037: no further message


async def read_day(client: Client, region: RegionId, day: str) -> list[UsagePage]:
    """The pages of that day (YYYY-MM-DD, UTC) of all the region's processes, each as it was last
    written. Raises RecordsUnavailable.

    The stream's leader is asked: a replica that is behind it may lack a page that was written anew.
    Pages that are written meanwhile come again, later: of each the last holds.
    """
    manager = client.jsm(timeout=REQUEST_S)
    pattern = subjects.usage(region, subjects.ANY, day, subjects.ANY)
    pages, seq = {}, 0
    try:
        while True:
            found = await manager.get_msg(
                subjects.STREAM_USAGE, seq=seq + 1, subject=pattern, next=True
            )
            assert found.seq is not None
            seq = found.seq
            pages[found.subject] = decode_page(found.data or b"")
    except nats.js.errors.NotFoundError as error:
        if error.err_code == NO_STREAM:
            raise _unreadable(error) from error
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError, WireError) as error:
        raise _unreadable(error) from error
    return list(pages.values())


def _unreadable(error: Exception) -> RecordsUnavailable:
    why = str(error) or type(error).__name__
    return RecordsUnavailable(
        f"the region's stream {subjects.STREAM_USAGE} gives no answer ({why}); "
        "was `mesh infra streams` run, and is its nats-server rendered anew since an upgrade?"
    )
