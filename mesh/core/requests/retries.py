"""Whether a request that failed before its first byte is worth another attempt elsewhere.

A lost connection, a hang or rubbish says something of the replica, so others are asked, up to
`failures_max` attempts. An engine's own error may be the request's fault: some engines answer 500
to a prompt that is too long, or to an image, and would do so everywhere. Or the engine's: one that
has lost its GPU answers 500 to all. One more engine tells the two apart; a third would only cost.
501 is always the request's fault. 429 says that this engine is full, which others may not be.

Rejected: no second attempt on an engine of the same kind, which would show its clients the end of
every engine process that answers 500 while it dies, though healthy ones stand idle beside it.
"""

from mesh.core.requests.inflight import Inflight

STATUS_NOT_IMPLEMENTED = 501
SERVER_ERRORS = range(500, 600)
SERVER_ERRORS_MAX = 2  # of the engines that one request was tried on


def note_status(record: Inflight, status: int | None) -> None:
    """The attempt under way failed; `status`: of the engine's error, if it answered with one."""
    record.engine_status = status
    if status in SERVER_ERRORS:
        record.server_errors += 1


def is_worth_another(record: Inflight, failures_max: int) -> bool:
    """Whether a replica that has not failed it may do better."""
    if record.failures >= failures_max or record.engine_status == STATUS_NOT_IMPLEMENTED:
        return False
    return record.engine_status is None or record.server_errors < SERVER_ERRORS_MAX
