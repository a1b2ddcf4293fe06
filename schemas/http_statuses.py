"""HTTP statuses, by what they say."""

OK, INVALID, UNAUTHORIZED, NOT_FOUND, TOO_MANY = 200, 400, 401, 404, 429
SERVER_ERROR, NOT_IMPLEMENTED = 500, 501

SUCCESS = range(200, 300)
CLIENT_ERRORS, SERVER_ERRORS = range(400, 500), range(500, 600)
LOGINS = (UNAUTHORIZED, 403)
PATH_UNKNOWN = (NOT_FOUND, 405, NOT_IMPLEMENTED)  # llama.cpp answers 501 without `--embeddings`
NOT_THIS_PATH = (*PATH_UNKNOWN, INVALID, 422)  # older vLLM: 400 for a model without embeddings
