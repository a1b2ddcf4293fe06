"""The routes of the HTTP face: method, path, shapes, and the errors of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from schemas.batch_http import (
    Batch,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FileUpload,
)
from schemas.engine_routes import TRANSCRIPTIONS, TRANSLATIONS
from schemas.engine_shapes import (
    AudioForm,
    EngineAnswer,
    MessagesRequest,
    PromptWork,
    ResponsesRequest,
)
from schemas.http import (
    BATCH,
    BATCH_CANCEL,
    BATCHES,
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    FILE,
    FILE_CONTENT,
    FILES,
    HEALTH,
    JSON_LINES,
    MESSAGES,
    METRICS,
    MODEL,
    MODELS,
    POOLING,
    READY,
    REGIONS,
    RERANK,
    RESPONSES,
    SCORE,
    TOKENIZE,
    Answer,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    Fault,
    Model,
    ModelList,
    Readiness,
    RegionList,
)
from schemas.response_calls import RESPONSE, RESPONSE_CANCEL, RESPONSE_INPUT


class Route(NamedTuple):
    method: str
    path: str
    name: str
    about: str
    faults: Sequence[Fault] = ()
    request: type[Any] | None = None  # a form where it is in `FORMS`, else JSON
    answer: type[Any] | str = "text/plain"  # a media type when it is no JSON of ours


FORMS = (FileUpload, AudioForm)
_OF_KEYS = (
    *(Fault.KEY_MISSING, Fault.KEY_WRONG, Fault.KEY_FORBIDDEN, Fault.KEYS_WRONG),
    Fault.KEYS_UNREAD,
)
_STORED = (Fault.INVALID, *_OF_KEYS, Fault.NO_BATCH, Fault.STORE_AWAY)
_STORING = (*_STORED, Fault.REQUEST_TIMEOUT, Fault.ENCODING, Fault.EXPECTATION, Fault.DRAINING)
_OF_FILE = (*_STORED, Fault.FILE_UNKNOWN)
_OF_BATCH = (*_STORED, Fault.BATCH_UNKNOWN)
_FILES_FAULTS = (*_OF_FILE, Fault.TRANSFERS_FULL)
_LIST_FAULTS = (*_OF_BATCH, Fault.TRANSFERS_FULL)
_UPLOAD_FAULTS = (*_STORING, Fault.FILE_TOO_LARGE, Fault.TRANSFERS_FULL, Fault.STORE_FULL)
_CONTENT_FAULTS = (*_OF_FILE, Fault.RANGE_WRONG, Fault.TRANSFERS_FULL)
_BATCH_FAULTS = (*_STORING, Fault.RESIDENCY, Fault.BODY_TOO_LARGE, Fault.BATCHES_FULL)
_ELSEWHERE = frozenset(
    (
        *(Fault.PATH_UNKNOWN, Fault.METHOD_WRONG, Fault.NO_BATCH),
        *(Fault.FILE_UNKNOWN, Fault.BATCH_UNKNOWN, Fault.BATCH_OVER, Fault.FILE_TOO_LARGE),
        *(Fault.STATE_GONE, Fault.RESPONSE_UNKNOWN, Fault.UPGRADE),
        *(Fault.RANGE_WRONG, Fault.BATCHES_FULL, Fault.TRANSFERS_FULL),
        *(Fault.STORE_AWAY, Fault.STORE_FULL),
    )
)
_OPTIONAL_FAULTS = tuple(fault for fault in Fault if fault not in _ELSEWHERE)
_OF_BODIES = (Fault.BODY_TOO_LARGE, Fault.REQUEST_TIMEOUT, Fault.ENCODING, Fault.EXPECTATION)
_OF_MODELS = (Fault.MODEL_UNKNOWN, Fault.PATH_UNSERVED)
_CALL_FAULTS = (
    *(fault for fault in _OPTIONAL_FAULTS if fault not in (*_OF_BODIES, *_OF_MODELS)),
    Fault.RESPONSE_UNKNOWN,
)
_WORK_FAULTS = tuple(fault for fault in _OPTIONAL_FAULTS if fault is not Fault.PATH_UNSERVED)
_PROMPT_WORK = (
    (RERANK, "rerank", "Documents by how well they fit a query; `/rerank` is the same."),
    (SCORE, "score", "How well texts fit each other; `/score` is the same."),
    (CLASSIFY, "classify", "Classes of texts."),
    (POOLING, "pool", "What a model's pooler makes of texts."),
    (TOKENIZE, "tokenize", "The tokens of a text or a chat."),
    (DETOKENIZE, "detokenize", "The text of tokens."),
)
_RESPONSE_CALLS = (
    ("GET", RESPONSE, "retrieveResponse", "A response, from the replica that keeps it."),
    ("DELETE", RESPONSE, "deleteResponse", "Forget it, where the engine can."),
    ("POST", RESPONSE_CANCEL, "cancelResponse", "Stop it, where the engine can."),
    ("GET", RESPONSE_INPUT, "listInputItems", "Its input, where the engine lists that."),
)
_NO_MODEL = (*_OF_KEYS, Fault.NO_REPLICA, Fault.DRAINING)
ROUTES = (
    Route(
        "POST", CHAT, "createChatCompletion", "Answer a chat.", _WORK_FAULTS, ChatRequest, Answer
    ),
    Route(
        "POST",
        COMPLETIONS,
        "createCompletion",
        "Continue a text.",
        _WORK_FAULTS,
        CompletionRequest,
        Answer,
    ),
    Route(
        "POST",
        EMBEDDINGS,
        "createEmbedding",
        "Vectors of texts, where an engine of the model makes them.",
        _OPTIONAL_FAULTS,
        EmbeddingRequest,
        Embeddings,
    ),
    Route(
        "POST",
        MESSAGES,
        "createMessage",
        "Anthropic's Messages, where an engine of the model answers them. Errors have Anthropic's "
        "form.",
        _OPTIONAL_FAULTS,
        MessagesRequest,
        EngineAnswer,
    ),
    Route(
        "POST",
        COUNT_TOKENS,
        "countMessageTokens",
        "Tokens of such a request, where an engine of the model counts them.",
        _OPTIONAL_FAULTS,
        MessagesRequest,
        EngineAnswer,
    ),
    Route(
        "POST",
        RESPONSES,
        "createResponse",
        "OpenAI's Responses, where an engine of the model answers them.",
        (*_OPTIONAL_FAULTS, Fault.STATE_GONE),
        ResponsesRequest,
        EngineAnswer,
    ),
    *(
        Route(method, path, name, about, _CALL_FAULTS, answer=EngineAnswer)
        for method, path, name, about in _RESPONSE_CALLS
    ),
    Route(
        "POST",
        TRANSCRIPTIONS,
        "createTranscription",
        "The text of a recording, where an engine of the model writes it.",
        _OPTIONAL_FAULTS,
        AudioForm,
        EngineAnswer,
    ),
    Route(
        "POST",
        TRANSLATIONS,
        "createTranslation",
        "The same in English.",
        _OPTIONAL_FAULTS,
        AudioForm,
        EngineAnswer,
    ),
    *(
        Route("POST", path, name, about, _OPTIONAL_FAULTS, PromptWork, EngineAnswer)
        for path, name, about in _PROMPT_WORK
    ),
    Route("GET", MODELS, "listModels", "The models served here.", _NO_MODEL, answer=ModelList),
    Route(
        "GET",
        MODEL,
        "retrieveModel",
        "One of them.",
        (Fault.MODEL_UNKNOWN, *_NO_MODEL),
        answer=Model,
    ),
    Route("POST", FILES, "createFile", "Upload a file.", _UPLOAD_FAULTS, FileUpload, FileObject),
    Route("GET", FILES, "listFiles", "The tenant's files.", _FILES_FAULTS, answer=FileList),
    Route("GET", FILE, "retrieveFile", "One of them.", _OF_FILE, answer=FileObject),
    Route("DELETE", FILE, "deleteFile", "Delete one.", _OF_FILE, answer=FileDeleted),
    Route("GET", FILE_CONTENT, "downloadFile", "Its bytes.", _CONTENT_FAULTS, answer=JSON_LINES),
    Route("POST", BATCHES, "createBatch", "Make a job.", _BATCH_FAULTS, BatchRequest, Batch),
    Route("GET", BATCHES, "listBatches", "Jobs, the newest first.", _LIST_FAULTS, answer=BatchList),
    Route("GET", BATCH, "retrieveBatch", "One of them.", _OF_BATCH, answer=Batch),
    Route(
        "POST",
        BATCH_CANCEL,
        "cancelBatch",
        "End one; what is answered by then is kept.",
        (*_OF_BATCH, Fault.BATCH_OVER, Fault.DRAINING),
        answer=Batch,
    ),
    Route(
        "GET",
        REGIONS,
        "listRegions",
        "The regions as this router sees them, nearest first: to itself, or to `near`. A query of "
        "another name is a 400.",
        (Fault.INVALID,),
        answer=RegionList,
    ),
    Route("GET", HEALTH, "health", "200 while the process lives."),
    Route(
        "GET",
        READY,
        "ready",
        "200 while requests can be placed: on the bus, not draining, some replica known, room for "
        "one more.",
        (Fault.NO_REPLICA, Fault.OVERLOADED, Fault.DRAINING, Fault.KEYS_UNREAD),
        answer=Readiness,
    ),
    Route("GET", METRICS, "metrics", "Prometheus metrics.", _OF_KEYS),
)
