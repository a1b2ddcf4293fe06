"""Prompts of requests: their block hashes, and their tokens as engines counted them."""

from mesh.core.model.prompt import Prompt, PromptText, TextSize, TokenEstimate, block_hashes
from schemas.ids import ModelId

MODELS_MAX = 256  # estimates kept; a mesh serves far fewer models


class PromptReader:
    """Hashes prompts and estimates their tokens, as learned per model."""

    def __init__(self, hash_key: str) -> None:
        self._hash_key = hash_key
        self._estimates: dict[ModelId, TokenEstimate] = {}

    def read(self, model: ModelId, text: PromptText, salt: str = "", tenant: str = "") -> Prompt:
        """The prompt of that text; shared only with prompts of the same `salt` and `tenant`."""
        hashes = block_hashes(text.data, key=self._hash_key, model=model, salt=salt, tenant=tenant)
        return self._estimate(model).prompt(text, hashes)

    def learn(self, model: ModelId, size: TextSize, prompt_tokens: int) -> None:
        """What an engine counted for a text of that size."""
        self._estimate(model).observe(size, prompt_tokens)

    def _estimate(self, model: ModelId) -> TokenEstimate:
        estimate = self._estimates.get(model)
        if estimate is None:
            if len(self._estimates) >= MODELS_MAX:
                self._estimates.pop(next(iter(self._estimates)))
            estimate = self._estimates[model] = TokenEstimate()
        return estimate
