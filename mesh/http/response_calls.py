"""Reads a call about a response that an engine keeps, whose id and query may be any text.

What is wrong with it names no id: whoever has one reads a conversation, and errors are logged.
"""

from urllib.parse import parse_qsl

from mesh.adapters.refused import RequestRefused
from mesh.core.model.prompt_shapes import CALL_TEXT
from mesh.core.model.served_names import KEPT_RESPONSE
from mesh.http.read_request import BodyFields, LowerHeaders, ParsedRequest, read_options, timeout_s
from schemas.http import Fault
from schemas.ids import RequestId
from schemas.response_calls import QUERY_CHARS_MAX, ResponseCall, is_query
from schemas.response_ids import place_of

RESPONSE_ID = "response_id"
NOT_KEPT_HERE = "no replica of this mesh keeps a response of that id"


def unknown_response(why: str = NOT_KEPT_HERE) -> RequestRefused:
    """The error for a response that nobody keeps."""
    return RequestRefused(Fault.RESPONSE_UNKNOWN, why, RESPONSE_ID)


def parsed_call(call: ResponseCall, headers: LowerHeaders, known_id: RequestId) -> ParsedRequest:
    """The request of that call. Raises RequestRefused for an id or a query that it can't have."""
    place = place_of(call.response_id)
    if place is None:
        raise unknown_response()
    if not is_query(call.query):
        message = f"the query must be percent-encoded and at most {QUERY_CHARS_MAX} long"
        raise RequestRefused(Fault.INVALID, message, "query")
    for name, text in parse_qsl(call.query, keep_blank_values=True):
        if name == "starting_after" or (name == "stream" and text.lower() not in ("false", "0")):
            message = f"a response that is kept is not streamed again; leave out {name}"
            raise RequestRefused(Fault.INVALID, message, name)
    options, timeout = read_options(headers, {}), timeout_s(headers)
    fields = BodyFields(KEPT_RESPONSE, {}, CALL_TEXT)
    about = call.path, b"", fields, KEPT_RESPONSE, timeout, options
    return ParsedRequest(known_id, *about, previous=place, call=call)
